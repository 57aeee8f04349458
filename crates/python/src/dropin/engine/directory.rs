//! Engines by the names that they gave themselves, at an HTTP metadata server.
//!
//! With one, a peer is named by what it was initialized with, and the server tells the address: one small
//! value for each engine, put when it starts and deleted when it closes. The server is Mooncake's or the
//! master's own; both keep any value under `?key=`. There is one request a connection, and an answer ends where its
//! length says, or the connection does. Every request has a deadline.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use thiserror::Error;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// How long one request may take.
const WITHIN: Duration = Duration::from_secs(3);

/// Largest answer that is read.
const ANSWER: u64 = 64 << 10;

/// Characters of an answer that an error shows.
const SHOWN: usize = 60;

/// What the values of engines are kept under.
const PREFIX: &str = "layercake/engine/";

/// Why the server gave no answer that helps.
#[derive(Debug, Error)]
pub(super) enum DirectoryError {
    #[error("the metadata server at {server} can't be asked: {source}")]
    Unreachable {
        server: String,
        source: std::io::Error,
    },
    #[error("the metadata server at {server} did not answer within {WITHIN:?}")]
    Timeout { server: String },
    #[error("the metadata server at {server} answered {status:?}: check the address")]
    Refused { server: String, status: String },
    #[error(
        "the metadata server at {server} answered {value:?} where an engine's address is kept: check the address"
    )]
    NoAddress { server: String, value: String },
}

/// An HTTP metadata server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Directory {
    /// `host:port`.
    server: String,
    path: String,
}

impl Directory {
    /// Of `http://host[:port][/path]`.
    pub(super) fn parse(address: &str) -> Option<Self> {
        let rest = address.strip_prefix("http://")?;
        let (host, path) = match rest.find('/') {
            Some(at) => rest.split_at(at),
            None => (rest, "/metadata"),
        };
        let usable = |text: &str| {
            text.bytes()
                .all(|byte| byte.is_ascii_graphic() && byte != b'?' && byte != b'#')
        };
        if host.is_empty() || !usable(host) || !usable(path) {
            return None;
        }
        let bare = host
            .rsplit_once(':')
            .is_none_or(|(_, port)| port.parse::<u16>().is_err());
        Some(Self {
            server: if bare {
                format!("{host}:80")
            } else {
                host.to_owned()
            },
            path: path.to_owned(),
        })
    }

    /// Tells where the engine of this name is.
    pub(super) async fn put(&self, name: &str, address: &str) -> Result<(), DirectoryError> {
        let answer = self.ask("PUT", name, address).await?;
        answer.accepted(self).map(drop)
    }

    /// Where the engine of this name is; `None` if nobody said so.
    pub(super) async fn get(&self, name: &str) -> Result<Option<String>, DirectoryError> {
        let answer = self.ask("GET", name, "").await?;
        if answer.status() == Some(404) {
            return Ok(None);
        }
        let address = answer.accepted(self)?.trim();
        if address.is_empty() {
            return Ok(None);
        }
        // Some services answer everything with a page of theirs.
        if address.parse::<SocketAddr>().is_err() {
            return Err(DirectoryError::NoAddress {
                server: self.server.clone(),
                value: address.chars().take(SHOWN).collect(),
            });
        }
        Ok(Some(address.to_owned()))
    }

    /// Takes back what [`put`](Self::put) told.
    pub(super) async fn delete(&self, name: &str) -> Result<(), DirectoryError> {
        self.ask("DELETE", name, "").await.map(drop)
    }

    async fn ask(&self, method: &str, name: &str, body: &str) -> Result<Answer, DirectoryError> {
        let exchange = self.exchange(method, name, body);
        match tokio::time::timeout(WITHIN, exchange).await {
            Ok(Ok(text)) => Ok(Answer(text)),
            Ok(Err(source)) => Err(DirectoryError::Unreachable {
                server: self.server.clone(),
                source,
            }),
            Err(_) => Err(DirectoryError::Timeout {
                server: self.server.clone(),
            }),
        }
    }

    async fn exchange(&self, method: &str, name: &str, body: &str) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(&self.server).await?;
        let request = format!(
            "{method} {}?key={PREFIX}{} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n\r\n{body}",
            self.path,
            escaped(name),
            self.server,
            body.len()
        );
        stream.write_all(request.as_bytes()).await?;
        let mut stream = stream.take(ANSWER);
        let mut answer = Vec::new();
        while !is_whole(&answer) && stream.read_buf(&mut answer).await? > 0 {}
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }
}

/// Whether these bytes are all of an answer that tells its length.
fn is_whole(answer: &[u8]) -> bool {
    let text = String::from_utf8_lossy(answer);
    let Some((head, body)) = text.split_once("\r\n\r\n") else {
        return false;
    };
    let lengths = head.lines().filter_map(|line| line.split_once(':'));
    lengths
        .filter(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .any(|(_, length)| {
            length
                .trim()
                .parse()
                .is_ok_and(|length: usize| body.len() >= length)
        })
}

/// A whole answer: status line, headers, body.
struct Answer(String);

impl Answer {
    fn status(&self) -> Option<u16> {
        self.0.split(' ').nth(1)?.parse().ok()
    }

    fn accepted(&self, directory: &Directory) -> Result<&str, DirectoryError> {
        if self.0.starts_with("HTTP/") && self.status() == Some(200) {
            return Ok(self.0.split_once("\r\n\r\n").map_or("", |(_, body)| body));
        }
        let line = self.0.lines().next().unwrap_or_default();
        Err(DirectoryError::Refused {
            server: directory.server.clone(),
            status: line.chars().take(SHOWN).collect(),
        })
    }
}

/// As a value in a query.
fn escaped(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => text.push(byte.into()),
            _ => {
                // Writing to a string can't fail.
                let _ = write!(text, "%{byte:02X}");
            }
        }
    }
    text
}

//! Settings from a Mooncake configuration in JSON, which `MOONCAKE_CONFIG_PATH` names.
//!
//! They stand behind this program's own file. Keys that mean nothing here are left alone: `layercake doctor`
//! says what becomes of each.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail};
use layercake_master::mooncake::parse_size;
use serde_json::{Map, Value};

/// The variable that names the file.
pub(crate) const ENV_MOONCAKE: &str = "MOONCAKE_CONFIG_PATH";

/// The variable by which "rdma" may stand for "tcp".
pub(crate) const ENV_FORCE_TCP: &str = "MC_FORCE_TCP";

/// What the file says about settings of this program.
#[derive(Clone, Debug)]
pub(crate) struct MooncakeFile {
    pub(crate) path: PathBuf,
    /// Values by the path of the setting, as text.
    values: Vec<(&'static str, String)>,
    protocol: Option<String>,
}

/// Whether a variable's text switches something on.
pub(crate) fn is_on(text: &str) -> bool {
    let text = text.to_ascii_lowercase();
    !matches!(text.as_str(), "" | "0" | "false" | "off")
}

impl MooncakeFile {
    /// Reads the file at `path`.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("can't read {ENV_MOONCAKE} {}", path.display()))?;
        Self::new(path.to_owned(), &text)
    }

    /// What it says about the setting with this path.
    pub(crate) fn value(&self, setting: &str) -> Option<&str> {
        let mut values = self.values.iter();
        let found = values.find(|(path, _)| *path == setting);
        found.map(|(_, value)| value.as_str())
    }

    /// Takes the text of the file at `path`; names of hosts are looked up.
    fn new(path: PathBuf, text: &str) -> Result<Self> {
        let read = || -> Result<_> {
            let file: Map<String, Value> =
                serde_json::from_str(text).context("a JSON object is needed")?;
            let text = |key: &str| match file.get(key) {
                None | Some(Value::Null) => Ok(None),
                Some(Value::String(text)) => Ok(Some(text.clone())),
                Some(Value::Number(number)) => Ok(Some(number.to_string())),
                Some(_) => Err(anyhow!("`{key}` is no text or number")),
            };
            let mut values = Vec::new();
            let master = text("master_server_address")?.or(text("master_server_addr")?);
            if let Some(master) = master {
                values.extend([("node.master", master.clone()), ("tools.master", master)]);
            }
            if let Some(size) = text("global_segment_size")? {
                let bytes = parse_size(&size)
                    .with_context(|| format!("`global_segment_size` is no size: \"{size}\""))?;
                values.push(("node.capacity", format!("{bytes}B")));
            }
            if let Some(host) = text("local_hostname")?.filter(|host| !host.is_empty()) {
                values.push(("node.listen", listen(&host)?.to_string()));
            }
            if let Some(tenant) = text("tenant_id")? {
                values.push(("tools.tenant", tenant));
            }
            Ok((values, text("protocol")?))
        };
        let (values, protocol) =
            read().with_context(|| format!("{ENV_MOONCAKE} {}", path.display()))?;
        Ok(Self {
            path,
            values,
            protocol,
        })
    }

    /// Refuses a protocol that is not there, where memory is lent: peers would move bytes by it.
    pub(crate) fn check_protocol(&self, force_tcp: bool) -> Result<()> {
        match self
            .protocol
            .as_deref()
            .map(str::to_ascii_lowercase)
            .as_deref()
        {
            None | Some("tcp" | "") => Ok(()),
            Some("rdma") if force_tcp => Ok(()),
            Some("rdma") => bail!(
                "{}: `protocol` is \"rdma\", which is not built in: write \"tcp\", or set {ENV_FORCE_TCP}=1",
                self.path.display()
            ),
            Some(other) => bail!(
                "{}: `protocol` is \"{other}\", which is not known: write \"tcp\"",
                self.path.display()
            ),
        }
    }
}

/// Where a node that is known as `host` listens. A port in it is another program's.
fn listen(host: &str) -> Result<SocketAddr> {
    let bare = match host.rsplit_once(':') {
        Some((bare, port)) if !bare.contains(':') && port.parse::<u16>().is_ok() => bare,
        _ => host,
    };
    let bare = bare.trim_start_matches('[').trim_end_matches(']');
    let found = (bare, 0).to_socket_addrs();
    let found = found.with_context(|| format!("`local_hostname` \"{host}\" can't be looked up"))?;
    // Mooncake's own names are those of IPv4 where there are both.
    let found: Vec<SocketAddr> = found.collect();
    let first = found
        .iter()
        .find(|address| address.is_ipv4())
        .or(found.first());
    first
        .copied()
        .with_context(|| format!("`local_hostname` \"{host}\" has no address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> Result<MooncakeFile> {
        MooncakeFile::new("mooncake.json".into(), text)
    }

    #[test]
    fn what_means_something_here_becomes_settings() {
        let file = file(
            r#"{"local_hostname": "127.0.0.1:12345", "metadata_server": "P2PHANDSHAKE", "global_segment_size": "4GB",
                "master_server_address": "10.0.0.1:50051", "tenant_id": "t", "protocol": "TCP", "device_name": ""}"#,
        )
        .expect("it makes sense");
        let expected = [
            ("node.master", "10.0.0.1:50051"),
            ("tools.master", "10.0.0.1:50051"),
            ("node.capacity", "4294967296B"),
            ("node.listen", "127.0.0.1:0"),
            ("tools.tenant", "t"),
        ];
        assert_eq!(
            file.values,
            expected.map(|(path, value)| (path, value.to_owned()))
        );
        assert!(file.check_protocol(false).is_ok());
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_the_file_and_the_key() {
        for (text, told) in [
            ("[]", "JSON object"),
            ("{", "JSON object"),
            (r#"{"global_segment_size": "much"}"#, "much"),
            (r#"{"global_segment_size": [1]}"#, "global_segment_size"),
            (
                r#"{"local_hostname": "no.such.host.invalid"}"#,
                "no.such.host.invalid",
            ),
        ] {
            let error = format!("{:#}", file(text).expect_err(text));
            assert!(
                error.contains(told) && error.contains("mooncake.json"),
                "{error}"
            );
        }
        let rdma = file(r#"{"protocol": "rdma"}"#).expect("it makes sense");
        assert!(rdma.check_protocol(true).is_ok());
        let error = rdma.check_protocol(false).expect_err("refused").to_string();
        assert!(error.contains("MC_FORCE_TCP"), "{error}");
        let other = file(r#"{"protocol": "pigeon"}"#).expect("it makes sense");
        assert!(other.check_protocol(true).is_err());
    }
}

//! Unix sockets that keep message boundaries and carry descriptors. No unsafe code, no waiting.
//!
//! Names are abstract: they vanish with their process and live in the network namespace, which is part
//! of the host's id. Abstract names have no permissions, so both sides compare the other's user.
//!
//! The other side counts as gone when its socket hangs up or its process has ended. The two differ
//! where a process forked: the child inherits the socket and keeps it open, but not the engine.

use std::io::{self, IoSlice, IoSliceMut};
use std::iter;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags,
    SocketType, UCred, recvmsg, sendmsg,
};
use rustix::process::{Pid, PidfdFlags};

use super::wire::MAX_LEN;

/// The most descriptors in one message.
const MAX_DESCRIPTORS: usize = 2;

/// Greetings that may wait to be accepted.
const BACKLOG: i32 = 128;

fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        flags,
        None,
    )?)
}

/// Listens under an abstract name.
pub(super) fn listen(name: &str) -> io::Result<OwnedFd> {
    let socket = socket()?;
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// One end of a connection to another engine.
#[derive(Debug)]
pub(super) struct Channel {
    socket: OwnedFd,
    /// The other side's process; none where the system can't name it.
    process: Option<OwnedFd>,
    credentials: UCred,
}

impl Channel {
    fn new(socket: OwnedFd) -> io::Result<Self> {
        let credentials = rustix::net::sockopt::socket_peercred(&socket)?;
        let process = rustix::process::pidfd_open(credentials.pid, PidfdFlags::empty());
        let process = process.inspect_err(|error| {
            tracing::debug!(pid = ?credentials.pid, %error, "can't watch a peer's process");
        });
        Ok(Self {
            socket,
            process: process.ok(),
            credentials,
        })
    }

    /// Takes a connection that has come; [`io::ErrorKind::WouldBlock`] if there is none.
    pub(super) fn accept(listener: &OwnedFd) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        Self::new(rustix::net::accept_with(listener, flags)?)
    }

    /// Connects; [`io::ErrorKind::WouldBlock`] if the listener's queue is full.
    pub(super) fn connect(name: &str) -> io::Result<Self> {
        let socket = socket()?;
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
        rustix::net::connect(&socket, &address)?;
        Self::new(socket)
    }

    /// The process at the other end, as the kernel saw it: the one that connected, or for the side
    /// that connected, the one that listened.
    pub(super) fn pid(&self) -> Pid {
        self.credentials.pid
    }

    /// Whether the other end is run by the same user.
    pub(super) fn is_same_user(&self) -> bool {
        self.credentials.uid == rustix::process::geteuid()
    }

    /// What to watch for messages and hang-ups.
    pub(super) fn watched(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let process = self.process.as_ref().map(AsFd::as_fd);
        iter::once(self.socket.as_fd()).chain(process)
    }

    /// Sends one message; [`io::ErrorKind::WouldBlock`] if there is no room for it now.
    pub(super) fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let rights = SendAncillaryMessage::ScmRights(descriptors);
        if !descriptors.is_empty() && !ancillary.push(rights) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut ancillary, flags)?;
        Ok(())
    }

    /// Takes a message that has come; [`io::ErrorKind::WouldBlock`] if there is none, `None` if the
    /// other side has hung up.
    pub(super) fn receive(&self) -> io::Result<Option<Received>> {
        let mut bytes = [0; MAX_LEN];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let mut buffers = [IoSliceMut::new(&mut bytes)];
        let got = recvmsg(&self.socket, &mut buffers, &mut ancillary, flags)?;
        let mut descriptors = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        if got
            .flags
            .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
        {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a message is longer, or carries more descriptors, than any of this protocol",
            ));
        }
        if got.bytes == 0 && descriptors.is_empty() {
            return Ok(None);
        }
        Ok(Some(Received {
            bytes: bytes[..got.bytes].to_vec(),
            descriptors,
        }))
    }

    /// Whether the other side is still there. Asks the kernel, without waiting.
    pub(super) fn is_open(&self) -> bool {
        let hung_up = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
        let socket = PollFd::new(&self.socket, PollFlags::RDHUP);
        let process = self.process.as_ref();
        let mut both = [
            socket.clone(),
            process.map_or(socket, |process| PollFd::new(process, PollFlags::IN)),
        ];
        let watched = if process.is_some() { 2 } else { 1 };
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        loop {
            match poll(&mut both[..watched], Some(&now)) {
                Ok(0) => return true,
                Ok(_) => {
                    let ended = watched == 2 && !both[1].revents().is_empty();
                    return !ended && !both[0].revents().intersects(hung_up);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }

    /// Tells the other side that nothing more will come; it can still be seen to go.
    pub(super) fn close_sending(&self) {
        if let Err(error) = rustix::net::shutdown(&self.socket, Shutdown::Write) {
            tracing::debug!(%error, "the peer had hung up before");
        }
    }
}

/// One message that has come.
#[derive(Debug)]
pub(super) struct Received {
    pub(super) bytes: Vec<u8>,
    pub(super) descriptors: Vec<OwnedFd>,
}

#[cfg(test)]
mod tests {
    use layercake_protocol::ids::EngineId;

    use super::*;

    fn pair() -> (Channel, Channel) {
        let name = format!("layercake-test-{}", EngineId::draw());
        let listener = listen(&name).expect("listens");
        let near = Channel::connect(&name).expect("connects");
        let far = Channel::accept(&listener).expect("accepts");
        (near, far)
    }

    #[test]
    fn messages_keep_their_boundaries_and_their_descriptors() {
        let (near, far) = pair();
        let (reader, writer) = rustix::pipe::pipe().expect("pipe");
        near.send(b"one", &[]).expect("sent");
        near.send(b"two", &[writer.as_fd()]).expect("sent");
        drop(writer);
        let one = far.receive().expect("received").expect("open");
        assert_eq!(
            (one.bytes.as_slice(), one.descriptors.len()),
            (&b"one"[..], 0)
        );
        let two = far.receive().expect("received").expect("open");
        assert_eq!(two.bytes, b"two");
        rustix::io::write(&two.descriptors[0], b"through").expect("writes");
        let mut bytes = [0; 16];
        assert_eq!(rustix::io::read(&reader, &mut bytes), Ok(7));
        let none = far.receive().expect_err("nothing more");
        assert_eq!(none.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn both_sides_know_each_other() {
        let (near, far) = pair();
        for side in [&near, &far] {
            assert_eq!(side.pid(), rustix::process::getpid());
            assert!(side.is_same_user());
        }
    }

    #[test]
    fn a_hang_up_is_seen_whether_or_not_something_is_unread() {
        let (near, far) = pair();
        assert!(near.is_open() && far.is_open());
        near.send(b"last words", &[]).expect("sent");
        assert!(far.is_open());
        drop(near);
        assert!(!far.is_open());
        assert!(far.receive().expect("received").is_some());
        assert!(far.receive().expect("closed").is_none());
    }

    #[test]
    fn a_half_closed_socket_counts_as_closed_on_the_far_side_only() {
        let (near, far) = pair();
        near.close_sending();
        assert!(!far.is_open() && near.is_open());
        drop(far);
        assert!(!near.is_open());
    }

    #[test]
    fn a_process_that_ended_is_gone_though_its_socket_lives_on_in_a_child() {
        let (near, mut far) = pair();
        let mut process = std::process::Command::new("true").spawn().expect("starts");
        let pid = Pid::from_child(&process);
        far.process = Some(rustix::process::pidfd_open(pid, PidfdFlags::empty()).expect("opened"));
        process.wait().expect("ends");
        assert!(!far.is_open());
        assert!(near.is_open());
    }

    #[test]
    fn what_is_too_long_is_not_taken_for_a_message() {
        let (near, far) = pair();
        near.send(&[1; MAX_LEN + 1], &[]).expect("sent");
        let error = far.receive().expect_err("too long");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(Channel::connect("layercake-test-nobody").is_err());
    }
}

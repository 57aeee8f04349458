//! Unix sockets that keep message boundaries and carry descriptors. No unsafe code, no waiting.
//!
//! Names are abstract: they vanish with their process and live in the network namespace, which is part
//! of the host's id. Abstract names have no permissions, so both sides compare the other's user.
//! Every descriptor is closed on exec, so a hang-up means that the process is gone.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    UCred, recvmsg, sendmsg,
};

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

/// Takes a connection that has come; [`io::ErrorKind::WouldBlock`] if there is none.
pub(super) fn accept(listener: &OwnedFd) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::accept_with(listener, flags)?)
}

/// Connects; [`io::ErrorKind::WouldBlock`] if the listener's queue is full.
pub(super) fn connect(name: &str) -> io::Result<OwnedFd> {
    let socket = socket()?;
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    rustix::net::connect(&socket, &address)?;
    Ok(socket)
}

/// Who is at the other end, as the kernel saw it: of a connection, who connected; for the side that
/// connected, who listened.
pub(super) fn peer(socket: impl AsFd) -> io::Result<UCred> {
    Ok(rustix::net::sockopt::socket_peercred(socket)?)
}

/// Sends one message; [`io::ErrorKind::WouldBlock`] if there is no room for it now.
pub(super) fn send(
    socket: impl AsFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, flags)?;
    Ok(())
}

/// One message that has come.
#[derive(Debug)]
pub(super) struct Received {
    pub(super) bytes: Vec<u8>,
    pub(super) descriptors: Vec<OwnedFd>,
}

/// Takes a message that has come; [`io::ErrorKind::WouldBlock`] if there is none, `None` if the other
/// side has hung up.
pub(super) fn receive(socket: impl AsFd) -> io::Result<Option<Received>> {
    let mut bytes = [0; MAX_LEN];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut ancillary,
        flags,
    )?;
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

/// Whether the other side still holds its end. Asks the kernel, without waiting.
pub(super) fn is_open(socket: impl AsFd) -> bool {
    let hung_up = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
    let mut fds = [PollFd::new(&socket, PollFlags::RDHUP)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    loop {
        match poll(&mut fds, Some(&now)) {
            Ok(_) => return !fds[0].revents().intersects(hung_up),
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

/// Tells the other side that nothing more will come; it still can be seen to hang up.
pub(super) fn close_sending(socket: impl AsFd) {
    if let Err(error) = rustix::net::shutdown(socket, rustix::net::Shutdown::Write) {
        tracing::debug!(%error, "the peer had hung up before");
    }
}

#[cfg(test)]
mod tests {
    use layercake_protocol::ids::EngineId;

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        let name = format!("layercake-test-{}", EngineId::draw());
        let listener = listen(&name).expect("listens");
        let near = connect(&name).expect("connects");
        let far = accept(&listener).expect("accepts");
        (near, far)
    }

    #[test]
    fn messages_keep_their_boundaries_and_their_descriptors() {
        let (near, far) = pair();
        let (reader, writer) = rustix::pipe::pipe().expect("pipe");
        send(&near, b"one", &[]).expect("sent");
        send(&near, b"two", &[writer.as_fd()]).expect("sent");
        drop(writer);
        let one = receive(&far).expect("received").expect("open");
        assert_eq!(
            (one.bytes.as_slice(), one.descriptors.len()),
            (&b"one"[..], 0)
        );
        let two = receive(&far).expect("received").expect("open");
        assert_eq!(two.bytes, b"two");
        rustix::io::write(&two.descriptors[0], b"through").expect("writes");
        let mut bytes = [0; 16];
        assert_eq!(rustix::io::read(&reader, &mut bytes), Ok(7));
        let none = receive(&far).expect_err("nothing more");
        assert_eq!(none.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn both_sides_know_each_other() {
        let (near, far) = pair();
        for side in [&near, &far] {
            let peer = peer(side).expect("known");
            assert_eq!(peer.pid, rustix::process::getpid());
            assert_eq!(peer.uid, rustix::process::geteuid());
        }
    }

    #[test]
    fn a_hang_up_is_seen_whether_or_not_something_is_unread() {
        let (near, far) = pair();
        assert!(is_open(&near) && is_open(&far));
        send(&near, b"last words", &[]).expect("sent");
        assert!(is_open(&far));
        drop(near);
        assert!(!is_open(&far));
        assert!(receive(&far).expect("received").is_some());
        assert!(receive(&far).expect("closed").is_none());
    }

    #[test]
    fn a_half_closed_socket_counts_as_closed_on_the_far_side_only() {
        let (near, far) = pair();
        close_sending(&near);
        assert!(!is_open(&far) && is_open(&near));
        drop(far);
        assert!(!is_open(&near));
    }

    #[test]
    fn what_is_too_long_is_not_taken_for_a_message() {
        let (near, far) = pair();
        send(&near, &[1; MAX_LEN + 1], &[]).expect("sent");
        assert_eq!(
            receive(&far).expect_err("too long").kind(),
            io::ErrorKind::InvalidData
        );
        assert!(connect("layercake-test-nobody").is_err());
    }
}

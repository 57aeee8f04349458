//! The methods of `mooncake.engine.TransferEngine`.

use std::sync::Arc;

use layercake_transport::Direction;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use super::calls::{Opcode, PyInnerTransferEngine, PyMooncakeEngine};
use super::directory::Directory;
use super::live::{Live, code};
use super::notify::{Notify, PyTransferNotify};
use super::under_way::Status;
use crate::args::{Bytes, Int, Ints};
use crate::dropin::member::{self, Unsupported};
use crate::memory;
use crate::runtime::{self, Owned};

/// Where peers are looked up, if not by their addresses.
fn directory(metadata: &str) -> Result<Option<Directory>, Unsupported> {
    if metadata == member::HANDSHAKE {
        return Ok(None);
    }
    let directory = Directory::parse(metadata);
    directory.map(Some).ok_or_else(|| Unsupported::Metadata {
        address: metadata.to_owned(),
    })
}

fn note(notify: Option<PyRef<'_, PyTransferNotify>>) -> Option<Notify> {
    notify.map(|notify| notify.get())
}

#[pymethods]
impl PyMooncakeEngine {
    #[new]
    fn new() -> Self {
        Self {
            live: Mutex::new(None),
        }
    }

    /// Starts the engine; once more starts it anew, with nothing registered: what was, is the program's alone when
    /// this returns, unless a store shares the engine from before.
    ///
    /// Args:
    ///     local_hostname: Where peers find it, ``host`` or ``host:port``; the port is chosen anew. With a metadata
    ///         server it is the name, as it is, under which peers find it.
    ///     metadata_server: ``"P2PHANDSHAKE"``, or the address of an HTTP metadata server.
    ///     protocol: ``"tcp"``.
    ///     device_name: Not used.
    #[pyo3(signature = (local_hostname, metadata_server, protocol, device_name, /))]
    fn initialize(
        &self,
        py: Python<'_>,
        local_hostname: &str,
        metadata_server: &str,
        protocol: &str,
        device_name: Option<&str>,
    ) -> PyResult<i64> {
        let _ = device_name;
        let prepared = py.detach(|| -> Result<_, Unsupported> {
            member::check_protocol(protocol)?;
            member::check_metadata(metadata_server)?;
            Ok((
                member::settings(local_hostname)?,
                directory(metadata_server)?,
            ))
        });
        let refused = |error: &dyn std::fmt::Display| {
            tracing::error!(%error, "the transfer engine was not initialized");
            Ok(code::FAILED)
        };
        // Has logging started, for what is refused as well.
        runtime::handle(py)?;
        let (settings, directory) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return refused(&error),
        };
        let host = local_hostname.to_owned();
        let before = self.live()?;
        // Not the engine itself: whoever holds it last ends it.
        let before = before.and_then(|live| live.listed_at());
        match runtime::run(py, Live::start(settings, host, directory, before))? {
            Ok(live) => {
                runtime::close_later(py, live.named());
                let live = Owned::new(Arc::new(live));
                let before = self.live.lock().replace(live);
                drop(before);
                Ok(0)
            }
            Err(error) => refused(&error),
        }
    }

    /// As :meth:`initialize`; the kind of the metadata server follows from its address.
    #[pyo3(signature = (local_hostname, metadata_server, protocol, device_name, metadata_type, /))]
    fn initialize_ext(
        &self,
        py: Python<'_>,
        local_hostname: &str,
        metadata_server: &str,
        protocol: &str,
        device_name: Option<&str>,
        metadata_type: &str,
    ) -> PyResult<i64> {
        let _ = metadata_type;
        self.initialize(py, local_hostname, metadata_server, protocol, device_name)
    }

    /// The port under which peers find this engine; negative before :meth:`initialize`.
    fn get_rpc_port(&self) -> PyResult<i64> {
        let live = self.live()?;
        Ok(live.map_or(code::FAILED, |live| live.peers().address().port().into()))
    }

    /// What a store takes as ``engine``; None before :meth:`initialize`.
    fn get_engine(&self) -> PyResult<Option<PyInnerTransferEngine>> {
        let live = self.live()?;
        Ok(live.map(PyInnerTransferEngine::new))
    }

    /// Registers memory: peers may read and write it. 0; -7 if a part of it is registered already, -1 if it is not
    /// memory of this host's processor.
    #[pyo3(signature = (buffer_addr, capacity, location = "*"))]
    fn register_memory(
        &self,
        py: Python<'_>,
        buffer_addr: Int,
        capacity: Int,
        location: &str,
    ) -> PyResult<i64> {
        let _ = location;
        self.with(py, code::FAILED, |live| {
            live.register(buffer_addr.0, capacity.0)
        })
    }

    /// Unregisters what begins exactly there, once nothing moves in it any more. 0, or -3.
    #[pyo3(signature = (buffer_addr, /))]
    fn unregister_memory(&self, py: Python<'_>, buffer_addr: Int) -> PyResult<i64> {
        self.with(py, code::FAILED, |live| live.unregister(buffer_addr.0))
    }

    /// Registers all of them, or none and answers with the first code.
    #[pyo3(signature = (buffer_addresses, capacities, location = "*"))]
    fn batch_register_memory(
        &self,
        py: Python<'_>,
        buffer_addresses: Ints,
        capacities: Ints,
        location: &str,
    ) -> PyResult<i64> {
        let _ = location;
        self.with(py, code::FAILED, |live| {
            live.register_all(&buffer_addresses.0, &capacities.0)
        })
    }

    /// Unregisters each of them that is registered. 0, or the first code that is not.
    #[pyo3(signature = (buffer_addresses, /))]
    fn batch_unregister_memory(&self, py: Python<'_>, buffer_addresses: Ints) -> PyResult<i64> {
        self.with(py, code::FAILED, |live| {
            live.unregister_all(&buffer_addresses.0)
        })
    }

    /// The address of new memory that peers may read and write; 0 if there is none.
    #[pyo3(signature = (length, /))]
    fn allocate_managed_buffer(&self, py: Python<'_>, length: Int) -> PyResult<u64> {
        self.with(py, 0, |live| live.allocate(length.0))
    }

    /// Frees what :meth:`allocate_managed_buffer` gave. 0; negative if it is no such memory, or freed already.
    #[pyo3(signature = (address, length, /))]
    fn free_managed_buffer(&self, py: Python<'_>, address: Int, length: Int) -> PyResult<i64> {
        let _ = length;
        self.with(py, code::FAILED, |live| live.free(address.0))
    }

    /// Copies the first ``length`` bytes of ``data``, a text or bytes, to an address of this process.
    #[staticmethod]
    #[pyo3(signature = (address, data, length, /))]
    fn write_bytes_to_buffer(
        py: Python<'_>,
        address: Int,
        data: &Bound<'_, PyAny>,
        length: Int,
    ) -> PyResult<i64> {
        let copy = match data.cast::<PyString>() {
            Ok(text) => text.to_str()?.as_bytes().to_vec(),
            Err(_) => memory::copy_of(&data.extract::<Bytes>()?).unwrap_or_default(),
        };
        let bytes = usize::try_from(length.0)
            .ok()
            .and_then(|len| copy.get(..len));
        match bytes {
            Some(bytes) if py.detach(|| memory::copy_in(address.0, bytes)).is_ok() => Ok(0),
            _ => Ok(code::FAILED),
        }
    }

    /// The bytes at an address of this process; none if they can't be read.
    #[staticmethod]
    #[pyo3(signature = (address, length, /))]
    fn read_bytes_from_buffer(py: Python<'_>, address: Int, length: Int) -> Bound<'_, PyBytes> {
        let bytes = py.detach(|| memory::copy_out(address.0, length.0));
        PyBytes::new(py, &bytes.unwrap_or_default())
    }

    /// Writes local memory to memory that the peer registered, and returns when it is there. 0, or -1.
    #[pyo3(signature = (target_hostname, buffer, peer_buffer_address, length, transport_hint = ""))]
    fn transfer_sync_write(
        &self,
        py: Python<'_>,
        target_hostname: &str,
        buffer: Int,
        peer_buffer_address: Int,
        length: Int,
        transport_hint: &str,
    ) -> PyResult<i64> {
        let _ = transport_hint;
        let piece = [buffer, peer_buffer_address, length];
        self.one(py, target_hostname, Direction::Write, piece, None)
    }

    /// Reads memory that the peer registered into local memory. 0, or -1.
    #[pyo3(signature = (target_hostname, buffer, peer_buffer_address, length, transport_hint = ""))]
    fn transfer_sync_read(
        &self,
        py: Python<'_>,
        target_hostname: &str,
        buffer: Int,
        peer_buffer_address: Int,
        length: Int,
        transport_hint: &str,
    ) -> PyResult<i64> {
        let _ = transport_hint;
        let piece = [buffer, peer_buffer_address, length];
        self.one(py, target_hostname, Direction::Read, piece, None)
    }

    /// Either direction; then sends the peer a message, if one is given.
    #[expect(clippy::too_many_arguments, reason = "it is the interface")]
    #[pyo3(signature = (
        target_hostname, buffer, peer_buffer_address, length, opcode, notify = None, transport_hint = ""
    ))]
    fn transfer_sync(
        &self,
        py: Python<'_>,
        target_hostname: &str,
        buffer: Int,
        peer_buffer_address: Int,
        length: Int,
        opcode: Opcode,
        notify: Option<PyRef<'_, PyTransferNotify>>,
        transport_hint: &str,
    ) -> PyResult<i64> {
        let _ = transport_hint;
        let piece = [buffer, peer_buffer_address, length];
        self.one(py, target_hostname, opcode.0, piece, note(notify))
    }

    /// Writes pieces of local memory to memory that the peer registered. 0 when all of them are there; -1 if one
    /// failed, and then others may have been written.
    #[pyo3(signature = (target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint = ""))]
    fn batch_transfer_sync_write(
        &self,
        py: Python<'_>,
        target_hostname: &str,
        buffers: Ints,
        peer_buffer_addresses: Ints,
        lengths: Ints,
        transport_hint: &str,
    ) -> PyResult<i64> {
        let _ = transport_hint;
        let pieces = [&buffers, &peer_buffer_addresses, &lengths];
        self.many(py, target_hostname, Direction::Write, pieces, None)
    }

    /// Reads pieces of memory that the peer registered. As :meth:`batch_transfer_sync_write`.
    #[pyo3(signature = (target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint = ""))]
    fn batch_transfer_sync_read(
        &self,
        py: Python<'_>,
        target_hostname: &str,
        buffers: Ints,
        peer_buffer_addresses: Ints,
        lengths: Ints,
        transport_hint: &str,
    ) -> PyResult<i64> {
        let _ = transport_hint;
        let pieces = [&buffers, &peer_buffer_addresses, &lengths];
        self.many(py, target_hostname, Direction::Read, pieces, None)
    }

    /// Either direction; then sends the peer a message, if one is given.
    #[expect(clippy::too_many_arguments, reason = "it is the interface")]
    #[pyo3(signature = (
        target_hostname, buffers, peer_buffer_addresses, lengths, opcode, notify = None, transport_hint = ""
    ))]
    fn batch_transfer_sync(
        &self,
        py: Python<'_>,
        target_hostname: &str,
        buffers: Ints,
        peer_buffer_addresses: Ints,
        lengths: Ints,
        opcode: Opcode,
        notify: Option<PyRef<'_, PyTransferNotify>>,
        transport_hint: &str,
    ) -> PyResult<i64> {
        let _ = transport_hint;
        let pieces = [&buffers, &peer_buffer_addresses, &lengths];
        self.many(py, target_hostname, opcode.0, pieces, note(notify))
    }

    /// Starts writing, and returns a number to ask :meth:`transfer_check_status` about; 0 if it can't be started.
    #[pyo3(signature = (target_hostname, buffer, peer_buffer_address, length, transport_hint = ""))]
    fn transfer_submit_write(
        &self,
        py: Python<'_>,
        target_hostname: &str,
        buffer: Int,
        peer_buffer_address: Int,
        length: Int,
        transport_hint: &str,
    ) -> PyResult<u64> {
        let _ = transport_hint;
        let piece: [&[u64]; 3] = [&[buffer.0], &[peer_buffer_address.0], &[length.0]];
        self.start(py, target_hostname, Direction::Write, piece)
    }

    /// How a transfer stands: 1 done, 0 under way, negative failed or unknown.
    #[pyo3(signature = (batch_id, /))]
    fn transfer_check_status(&self, batch_id: Int) -> PyResult<i64> {
        let status = self
            .live()?
            .and_then(|live| live.under_way.status(batch_id.0));
        Ok(match status {
            Some(Status::Done) => 1,
            Some(Status::Running) => 0,
            Some(Status::Failed) | None => code::FAILED,
        })
    }

    /// As :meth:`transfer_submit_write`, for pieces.
    #[pyo3(signature = (target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint = ""))]
    fn batch_transfer_async_write(
        &self,
        py: Python<'_>,
        target_hostname: &str,
        buffers: Ints,
        peer_buffer_addresses: Ints,
        lengths: Ints,
        transport_hint: &str,
    ) -> PyResult<u64> {
        let _ = transport_hint;
        let pieces: [&[u64]; 3] = [&buffers.0, &peer_buffer_addresses.0, &lengths.0];
        self.start(py, target_hostname, Direction::Write, pieces)
    }

    /// Starts reading pieces. As :meth:`batch_transfer_async_write`.
    #[pyo3(signature = (target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint = ""))]
    fn batch_transfer_async_read(
        &self,
        py: Python<'_>,
        target_hostname: &str,
        buffers: Ints,
        peer_buffer_addresses: Ints,
        lengths: Ints,
        transport_hint: &str,
    ) -> PyResult<u64> {
        let _ = transport_hint;
        let pieces: [&[u64]; 3] = [&buffers.0, &peer_buffer_addresses.0, &lengths.0];
        self.start(py, target_hostname, Direction::Read, pieces)
    }

    /// Starts either direction. As :meth:`batch_transfer_async_write`.
    #[expect(clippy::too_many_arguments, reason = "it is the interface")]
    #[pyo3(signature = (
        target_hostname, buffers, peer_buffer_addresses, lengths, opcode, transport_hint = ""
    ))]
    fn batch_transfer_async(
        &self,
        py: Python<'_>,
        target_hostname: &str,
        buffers: Ints,
        peer_buffer_addresses: Ints,
        lengths: Ints,
        opcode: Opcode,
        transport_hint: &str,
    ) -> PyResult<u64> {
        let _ = transport_hint;
        let pieces: [&[u64]; 3] = [&buffers.0, &peer_buffer_addresses.0, &lengths.0];
        self.start(py, target_hostname, opcode.0, pieces)
    }

    /// Waits for these transfers. 0 if each is done; -1 if one failed or is unknown.
    #[pyo3(signature = (batch_ids, /))]
    fn get_batch_transfer_status(&self, py: Python<'_>, batch_ids: Ints) -> PyResult<i64> {
        self.with(py, code::FAILED, |live| live.wait(&batch_ids.0))
    }

    /// The address that a peer registered first; 0 if there is none, or nobody there.
    #[pyo3(signature = (peer, /))]
    fn get_first_buffer_address(&self, py: Python<'_>, peer: &str) -> PyResult<u64> {
        self.with(py, 0, |live| {
            live.probe(peer).ok().flatten().unwrap_or_default()
        })
    }

    /// Asks a peer whether it is there: 0 if it is.
    fn send_probe(&self, py: Python<'_>, peer_server_name: &str) -> PyResult<i64> {
        self.with(py, code::FAILED, |live| {
            match live.probe(peer_server_name) {
                Ok(_) => 0,
                Err(code) => code,
            }
        })
    }

    /// The messages that peers sent since the last call.
    fn get_notifies(&self) -> PyResult<Vec<PyTransferNotify>> {
        let Some(live) = self.live()? else {
            return Ok(Vec::new());
        };
        let taken = live.peers().take_notifications();
        let notifies = taken.into_iter().map(|(name, msg)| {
            let msg = String::from_utf8_lossy(&msg).into_owned();
            Notify { name, msg }.into()
        });
        Ok(notifies.collect())
    }
}

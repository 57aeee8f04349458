//! Whole objects from and to memory by address, in batches.

use std::cell::OnceCell;

use layercake_protocol::key::{KeyError, ObjectKey};
use layercake_store::PutRequest;
use pyo3::prelude::*;

use super::PyMooncakeStore;
use super::config::{Plan, PyConfig};
use super::report::Entries as _;
use crate::args::{Flag, Ints, Keys, Ragged};
use crate::core::StoreCore;
use crate::core::code::{self, Call};
use crate::core::reasons::invalid;
use crate::core::whole::PutItem;
use crate::memory::Use;
use crate::runtime;

/// The pieces of each key.
#[derive(Clone, Copy)]
pub(super) enum Rows<'a> {
    /// Of the only key: any number.
    One(&'a [u64], &'a [u64]),
    /// One for each key.
    Flat(&'a [u64], &'a [u64]),
    /// Any number for each key.
    Ragged(&'a Ragged, &'a Ragged),
}

impl<'a> Rows<'a> {
    fn row(self, index: usize) -> (&'a [u64], &'a [u64]) {
        match self {
            Self::One(addrs, lens) => (addrs, lens),
            Self::Flat(addrs, lens) => {
                let one = |all: &'a [u64]| all.get(index..=index).unwrap_or(&[]);
                (one(addrs), one(lens))
            }
            Self::Ragged(addrs, lens) => (addrs.row(index), lens.row(index)),
        }
    }

    /// Refuses if there is not one row for each of so many keys, of addresses and of lengths.
    fn check(self, keys: usize) -> Result<(), i64> {
        let lens = match self {
            Self::One(..) => [1, 1],
            Self::Flat(addrs, lens) => [addrs.len(), lens.len()],
            Self::Ragged(addrs, lens) => [addrs.len(), lens.len()],
        };
        if lens == [keys; 2] {
            Ok(())
        } else {
            Err(code::lists_differ(keys, &lens))
        }
    }

    /// Refuses if a row has not as many addresses as lengths.
    fn align(self, keys: usize) -> Result<(), i64> {
        (0..keys).try_for_each(|index| {
            let (addrs, lens) = self.row(index);
            code::check_row(&[addrs.len(), lens.len()])
        })
    }
}

/// Stores objects: one code for each key. Lists whose lengths differ anywhere refuse all of them.
pub(super) fn put_rows(
    store: &PyMooncakeStore,
    py: Python<'_>,
    name: &'static str,
    keys: &Keys,
    rows: Rows<'_>,
    config: Option<&Bound<'_, PyConfig>>,
    replace: bool,
) -> PyResult<Vec<i64>> {
    let plan = rows.check(keys.len()).and_then(|()| {
        rows.align(keys.len())?;
        Plan::new(config, keys.len())
    });
    let plan = match plan {
        Ok(plan) => plan,
        Err(code) => return Ok(keys.refused(name, code)),
    };
    store.try_codes(py, name, keys, |core| {
        let largest = OnceCell::new();
        let items = keys.iter().enumerate();
        let items = items.map(|(index, key)| {
            let (row, group) = (rows.row(index), plan.group(index));
            item(core, key, row, group, &largest)
        });
        core.put(
            items.collect(),
            &plan.config,
            replace,
            runtime::look_for_signals,
        )
    })
}

fn item(
    core: &StoreCore,
    key: Result<&ObjectKey, &KeyError>,
    (addrs, lens): (&[u64], &[u64]),
    group: Option<String>,
    largest: &OnceCell<u64>,
) -> PutItem {
    let key = key.map_err(invalid)?;
    let pieces = core.pieces(addrs, lens, Use::Read, Call::WholeWrite);
    let pieces = pieces.map_err(|code| core.without_room(lens, largest).unwrap_or(code))?;
    Ok(PutRequest {
        group,
        ..PutRequest::new(key.clone(), pieces)
    })
}

#[pymethods]
impl PyMooncakeStore {
    /// As ``put_from`` for *n* keys, with *n* addresses and *n* sizes in bytes: *n* codes.
    #[pyo3(signature = (keys, buffer_ptrs, sizes, config = None))]
    fn batch_put_from(
        &self,
        py: Python<'_>,
        keys: Keys,
        buffer_ptrs: Ints,
        sizes: Ints,
        config: Option<&Bound<'_, PyConfig>>,
    ) -> PyResult<Vec<i64>> {
        put_rows(
            self,
            py,
            "batch_put_from",
            &keys,
            Rows::Flat(&buffer_ptrs.0, &sizes.0),
            config,
            false,
        )
    }

    /// As ``upsert_from`` for *n* keys, with *n* addresses and *n* sizes in bytes: *n* codes.
    #[pyo3(signature = (keys, buffer_ptrs, sizes, config = None))]
    fn batch_upsert_from(
        &self,
        py: Python<'_>,
        keys: Keys,
        buffer_ptrs: Ints,
        sizes: Ints,
        config: Option<&Bound<'_, PyConfig>>,
    ) -> PyResult<Vec<i64>> {
        put_rows(
            self,
            py,
            "batch_upsert_from",
            &keys,
            Rows::Flat(&buffer_ptrs.0, &sizes.0),
            config,
            true,
        )
    }

    /// Stores objects, each of the bytes of several buffers in order, as ``config`` says.
    ///
    /// Args:
    ///     keys: *n* keys.
    ///     all_buffer_ptrs: For each key a row of addresses.
    ///     all_sizes: For each key a row of as many sizes in bytes; pieces without bytes are skipped.
    ///
    /// Returns:
    ///     *n* codes, 0 also for a key that exists or is being written. Rows that differ in length anywhere refuse all.
    #[pyo3(signature = (keys, all_buffer_ptrs, all_sizes, config = None))]
    fn batch_put_from_multi_buffers(
        &self,
        py: Python<'_>,
        keys: Keys,
        all_buffer_ptrs: Ragged,
        all_sizes: Ragged,
        config: Option<&Bound<'_, PyConfig>>,
    ) -> PyResult<Vec<i64>> {
        put_rows(
            self,
            py,
            "batch_put_from_multi_buffers",
            &keys,
            Rows::Ragged(&all_buffer_ptrs, &all_sizes),
            config,
            false,
        )
    }

    /// As ``get_into`` for *n* keys, with *n* addresses and *n* sizes in bytes: the object's size or a code for each key.
    fn batch_get_into(
        &self,
        py: Python<'_>,
        keys: Keys,
        buffer_ptrs: Ints,
        sizes: Ints,
    ) -> PyResult<Vec<i64>> {
        const NAME: &str = "batch_get_into";
        let rows = Rows::Flat(&buffer_ptrs.0, &sizes.0);
        if let Err(code) = rows.check(keys.len()) {
            return Ok(keys.refused(NAME, code));
        }
        self.codes(py, NAME, &keys, |core| {
            core.get_into_rows(&keys, |index| rows.row(index), true)
        })
    }

    /// Reads whole objects, each into several buffers with room for exactly its bytes.
    ///
    /// Args:
    ///     keys: *n* keys.
    ///     all_buffer_ptrs: For each key a row of addresses.
    ///     all_sizes: For each key a row of as many sizes in bytes.
    ///
    /// Returns:
    ///     For each key the object's size in bytes, or a code.
    #[pyo3(signature = (keys, all_buffer_ptrs, all_sizes, prefer_alloc_in_same_node = Flag(false)))]
    fn batch_get_into_multi_buffers(
        &self,
        py: Python<'_>,
        keys: Keys,
        all_buffer_ptrs: Ragged,
        all_sizes: Ragged,
        prefer_alloc_in_same_node: Flag,
    ) -> PyResult<Vec<i64>> {
        const NAME: &str = "batch_get_into_multi_buffers";
        // Nothing is allocated to read: bytes go where they belong.
        let _ = prefer_alloc_in_same_node;
        let rows = Rows::Ragged(&all_buffer_ptrs, &all_sizes);
        if let Err(code) = rows.check(keys.len()) {
            return Ok(keys.refused(NAME, code));
        }
        self.codes(py, NAME, &keys, |core| {
            core.get_into_rows(&keys, |index| rows.row(index), false)
        })
    }
}

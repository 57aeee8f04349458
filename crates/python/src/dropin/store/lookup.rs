//! Questions about keys, and their removal.

use pyo3::prelude::*;

use super::PyMooncakeStore;
use super::report::tell;
use crate::args::{Flag, Keys, OneKey};
use crate::core::code::INVALID;

/// Size, offset in the segment, and address of the owner.
type Description = (u64, u64, String);

#[pymethods]
impl PyMooncakeStore {
    /// 1: there; 0: not, or not finished; negative: not known.
    fn is_exist(&self, py: Python<'_>, key: OneKey) -> PyResult<i64> {
        self.code(py, "is_exist", &key, |core| core.exists(&key.0))
    }

    /// As ``is_exist`` for many.
    fn batch_is_exist(&self, py: Python<'_>, keys: Keys) -> PyResult<Vec<i64>> {
        self.codes(py, "batch_is_exist", &keys, |core| core.exists(&keys))
    }

    /// As ``batch_is_exist``, for objects that can be read now: with a replica on a live segment.
    fn batch_is_readable(&self, py: Python<'_>, keys: Keys) -> PyResult<Vec<i64>> {
        self.codes(py, "batch_is_readable", &keys, |core| core.readable(&keys))
    }

    /// The size of an object in bytes.
    fn get_size(&self, py: Python<'_>, key: OneKey) -> PyResult<i64> {
        self.code(py, "get_size", &key, |core| core.sizes(&key.0))
    }

    /// For each key the replicas of its object, or ``None``.
    fn _describe(&self, py: Python<'_>, keys: Keys) -> PyResult<Vec<Option<Vec<Description>>>> {
        let found = self.answer(py, vec![None; keys.len()], |core| core.describe(&keys))?;
        let replicas = found.into_iter().map(|replicas| {
            let replicas = replicas?.into_iter();
            Some(
                replicas
                    .map(|at| (at.size, at.offset, at.address))
                    .collect(),
            )
        });
        Ok(replicas.collect())
    }

    /// Removes an object; a leased one only with ``force``.
    #[pyo3(signature = (key, force = Flag(false)))]
    fn remove(&self, py: Python<'_>, key: OneKey, force: Flag) -> PyResult<i64> {
        self.code(py, "remove", &key, |core| core.remove(&key.0, force.0))
    }

    /// As ``remove`` for many, in order.
    #[pyo3(signature = (keys, force = Flag(false)))]
    fn batch_remove(&self, py: Python<'_>, keys: Keys, force: Flag) -> PyResult<Vec<i64>> {
        self.codes(py, "batch_remove", &keys, |core| {
            core.remove(&keys, force.0)
        })
    }

    /// Takes the replicas in a segment away, and objects that have no other: 0 or a code for each key.
    fn _drop_replicas(&self, py: Python<'_>, keys: Keys, segment: &str) -> PyResult<Vec<i64>> {
        self.codes(py, "drop_replicas", &keys, |core| {
            core.drop_replicas(&keys, segment)
        })
    }

    /// Removes the objects whose keys the regular expression matches anywhere; leased ones only with ``force``.
    /// Gives their number.
    #[pyo3(signature = (regex_pattern, force = Flag(false)))]
    fn remove_by_regex(&self, py: Python<'_>, regex_pattern: &str, force: Flag) -> PyResult<i64> {
        self.answer(py, INVALID, |core| {
            let code = core.remove_matching(regex_pattern, force.0);
            tell("remove_by_regex", &[code], |_| regex_pattern.to_owned());
            code
        })
    }

    /// Removes all objects; leased ones only with ``force``. Gives their number.
    #[pyo3(signature = (force = Flag(false)))]
    fn remove_all(&self, py: Python<'_>, force: Flag) -> PyResult<i64> {
        self.answer(py, INVALID, |core| {
            let code = core.remove_all(force.0);
            tell("remove_all", &[code], |_| "all keys".to_owned());
            code
        })
    }
}

//! The copying calls: values of Python objects in, `bytes` and buffers out.

use layercake_store::PutRequest;
use layercake_transport::LocalSlice;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use super::config::{Plan, PyConfig};
use super::report::{Entries as _, tell};
use super::whole::first_bad;
use super::{NOT_SET_UP, PyMooncakeStore};
use crate::args::{Keys, OneKey, Value};
use crate::core::code::{self, INVALID};
use crate::core::reasons::invalid;
use crate::core::whole::{OpenGets, PutItem, whole};
use crate::core::{ObjectCopy, StoreCore};
use crate::memory::{self, PyBufferHandle};
use crate::runtime;

impl PyMooncakeStore {
    /// Stores values, each in parts, which must outlive the call.
    fn put_values(
        &self,
        py: Python<'_>,
        name: &'static str,
        keys: &Keys,
        values: &[Vec<Value>],
        config: Option<&Bound<'_, PyConfig>>,
        replace: bool,
    ) -> PyResult<Vec<i64>> {
        let plan = match Plan::new(config, keys.len()) {
            Ok(plan) => plan,
            Err(code) => return Ok(keys.refused(name, code)),
        };
        let items: Vec<PutItem> = keys
            .iter()
            .zip(values)
            .enumerate()
            .map(|(index, (key, parts))| {
                let key = key.map_err(invalid)?;
                let parts = parts.iter().filter(|part| part.len() > 0);
                let pieces: Result<Vec<LocalSlice>, _> =
                    parts.map(|part| memory::lent(part)).collect();
                let pieces = pieces.map_err(invalid)?;
                Ok(PutRequest {
                    group: plan.group(index),
                    ..PutRequest::new(key.clone(), pieces)
                })
            })
            .collect();
        self.try_codes(py, name, keys, |core| {
            core.put(items, &plan.config, replace, runtime::look_for_signals)
        })
    }

    fn put_batch_of(
        &self,
        py: Python<'_>,
        name: &'static str,
        keys: &Keys,
        values: Vec<Value>,
        config: Option<&Bound<'_, PyConfig>>,
        replace: bool,
    ) -> PyResult<i64> {
        let refused = if values.len() == keys.len() {
            let empty = values.iter().position(|value| value.len() == 0);
            empty.map(|at| {
                invalid(format_args!(
                    "value {at} is empty: at least 1 byte is needed"
                ))
            })
        } else {
            Some(code::lists_differ(keys.len(), &[values.len()]))
        };
        if let Some(code) = refused {
            keys.refused(name, code);
            return Ok(code);
        }
        let values: Vec<Vec<Value>> = values.into_iter().map(|value| vec![value]).collect();
        let codes = self.put_values(py, name, keys, &values, config, replace)?;
        Ok(if keys.len() > 0 && self.core()?.is_none() {
            INVALID
        } else {
            first_bad(&codes)
        })
    }

    fn put_parts_of(
        &self,
        py: Python<'_>,
        name: &'static str,
        key: &Keys,
        parts: &Bound<'_, PyTuple>,
        config: Option<&Bound<'_, PyConfig>>,
        replace: bool,
    ) -> PyResult<i64> {
        let parts: PyResult<Vec<Value>> = parts.iter().map(|part| part.extract()).collect();
        Ok(first_bad(&self.put_values(
            py,
            name,
            key,
            &[parts?],
            config,
            replace,
        )?))
    }

    /// The bytes of whole objects; `None` where there is nothing to be had.
    fn get_values<'py>(
        &self,
        py: Python<'py>,
        name: &'static str,
        keys: &Keys,
    ) -> PyResult<Vec<Option<Bound<'py, PyBytes>>>> {
        let Some(core) = self.core()? else {
            keys.refused(name, invalid(NOT_SET_UP));
            return Ok(vec![None; keys.len()]);
        };
        let open = py.detach(|| core.open_gets(keys));
        let mut values = Vec::with_capacity(open.len());
        let mut items = Vec::with_capacity(open.len());
        for index in 0..open.len() {
            match open.size(index) {
                Ok(size) => {
                    let (bytes, local) = memory::blank_bytes(py, size)?;
                    values.push(Some(bytes));
                    items.push(Ok(whole(local)));
                }
                Err(refusal) => {
                    values.push(None);
                    items.push(Err(refusal));
                }
            }
        }
        let codes = py.detach(|| open.read(items));
        tell(name, &codes, |index| keys.name(index));
        let values = values.into_iter().zip(codes);
        Ok(values
            .map(|(value, code)| value.filter(|_| code >= 0))
            .collect())
    }

    /// Handles on the bytes of whole objects; `None` where there is nothing to be had.
    fn get_handles(
        &self,
        py: Python<'_>,
        name: &'static str,
        keys: &Keys,
    ) -> PyResult<Vec<Option<PyBufferHandle>>> {
        let Some(core) = self.core()? else {
            keys.refused(name, invalid(NOT_SET_UP));
            return Ok(std::iter::repeat_with(|| None).take(keys.len()).collect());
        };
        let copies = py.detach(|| {
            let (copies, codes) = read_copies(&core, core.open_gets(keys));
            tell(name, &codes, |index| keys.name(index));
            copies
        });
        Ok(copies
            .into_iter()
            .map(|copy| copy.map(PyBufferHandle::new))
            .collect())
    }
}

fn read_copies(core: &StoreCore, open: OpenGets<'_>) -> (Vec<Option<ObjectCopy>>, Vec<i64>) {
    let mut copies: Vec<Result<ObjectCopy, i64>> = (0..open.len())
        .map(|index| {
            let size = open.size(index)?;
            core.engine().copy_room(size).map_err(|error| {
                invalid(format_args!(
                    "no memory for a copy of {size} bytes: {error}"
                ))
            })
        })
        .collect();
    let items = copies.iter_mut().map(|copy| {
        let copy = copy.as_mut().map_err(|code| *code)?;
        Ok(whole(copy.slice().ok_or(INVALID)?))
    });
    let codes = open.read(items.collect());
    let copies = copies.into_iter().zip(&codes);
    let copies = copies.map(|(copy, code)| copy.ok().filter(|_| *code >= 0));
    (copies.collect(), codes)
}

fn or_empty<'py>(py: Python<'py>, value: Option<Bound<'py, PyBytes>>) -> Bound<'py, PyBytes> {
    value.unwrap_or_else(|| PyBytes::new(py, b""))
}

#[pymethods]
impl PyMooncakeStore {
    /// Stores a value if its key is free, as ``config`` says; 0 also if it is not: what is there stays.
    #[pyo3(signature = (key, value, config = None))]
    fn put(
        &self,
        py: Python<'_>,
        key: OneKey,
        value: Value,
        config: Option<&Bound<'_, PyConfig>>,
    ) -> PyResult<i64> {
        Ok(first_bad(&self.put_values(
            py,
            "put",
            &key.0,
            &[vec![value]],
            config,
            false,
        )?))
    }

    /// Stores a value, and replaces the one that is there.
    #[pyo3(signature = (key, value, config = None))]
    fn upsert(
        &self,
        py: Python<'_>,
        key: OneKey,
        value: Value,
        config: Option<&Bound<'_, PyConfig>>,
    ) -> PyResult<i64> {
        Ok(first_bad(&self.put_values(
            py,
            "upsert",
            &key.0,
            &[vec![value]],
            config,
            true,
        )?))
    }

    /// As ``put`` for many: the first code that is not 0.
    #[pyo3(signature = (keys, values, config = None))]
    fn put_batch(
        &self,
        py: Python<'_>,
        keys: Keys,
        values: Vec<Value>,
        config: Option<&Bound<'_, PyConfig>>,
    ) -> PyResult<i64> {
        self.put_batch_of(py, "put_batch", &keys, values, config, false)
    }

    /// As ``upsert`` for many: the first code that is not 0.
    #[pyo3(signature = (keys, values, config = None))]
    fn upsert_batch(
        &self,
        py: Python<'_>,
        keys: Keys,
        values: Vec<Value>,
        config: Option<&Bound<'_, PyConfig>>,
    ) -> PyResult<i64> {
        self.put_batch_of(py, "upsert_batch", &keys, values, config, true)
    }

    /// As ``put``, of a value in parts.
    #[pyo3(signature = (key, *parts, config = None))]
    fn put_parts(
        &self,
        py: Python<'_>,
        key: OneKey,
        parts: &Bound<'_, PyTuple>,
        config: Option<&Bound<'_, PyConfig>>,
    ) -> PyResult<i64> {
        self.put_parts_of(py, "put_parts", &key.0, parts, config, false)
    }

    /// As ``upsert``, of a value in parts.
    #[pyo3(signature = (key, *parts, config = None))]
    fn upsert_parts(
        &self,
        py: Python<'_>,
        key: OneKey,
        parts: &Bound<'_, PyTuple>,
        config: Option<&Bound<'_, PyConfig>>,
    ) -> PyResult<i64> {
        self.put_parts_of(py, "upsert_parts", &key.0, parts, config, true)
    }

    /// The value; ``b""`` if there is none, or it can't be read.
    fn get<'py>(&self, py: Python<'py>, key: OneKey) -> PyResult<Bound<'py, PyBytes>> {
        let value = self.get_values(py, "get", &key.0)?.pop().flatten();
        Ok(or_empty(py, value))
    }

    /// As ``get`` for many.
    fn get_batch<'py>(&self, py: Python<'py>, keys: Keys) -> PyResult<Bound<'py, PyList>> {
        let values = self.get_values(py, "get_batch", &keys)?.into_iter();
        PyList::new(
            py,
            values.map(|value| or_empty(py, value)).collect::<Vec<_>>(),
        )
    }

    /// A handle on a copy of the value; ``None`` if there is none, or it can't be read.
    fn get_buffer(&self, py: Python<'_>, key: OneKey) -> PyResult<Option<PyBufferHandle>> {
        Ok(self.get_handles(py, "get_buffer", &key.0)?.pop().flatten())
    }

    /// As ``get_buffer`` for many.
    fn batch_get_buffer(
        &self,
        py: Python<'_>,
        keys: Keys,
    ) -> PyResult<Vec<Option<PyBufferHandle>>> {
        self.get_handles(py, "batch_get_buffer", &keys)
    }
}

//! Keys of objects.

use layercake_protocol::key::{KeyError, ObjectKey};
use pyo3::Borrowed;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString, PyTuple};

use super::wrong_type;
use crate::errors::Kind;

/// One key; a text that can't be one raises `InvalidArgument`.
#[derive(Clone, Debug)]
pub(crate) struct Key(pub(crate) ObjectKey);

impl<'py> FromPyObject<'_, 'py> for Key {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        key(&obj)?
            .map(Self)
            .map_err(|error| Kind::InvalidArgument.err(error.to_string()))
    }
}

/// One key as a batch of one, for calls that answer a text that can't be a key with a code.
#[derive(Clone, Debug)]
pub(crate) struct OneKey(pub(crate) Keys);

impl<'py> FromPyObject<'_, 'py> for OneKey {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let mut keys = Keys::default();
        keys.push(&obj)?;
        Ok(Self(keys))
    }
}

/// The keys of a batch. A text that can't be a key fails its own entry only.
#[derive(Clone, Debug, Default)]
pub(crate) struct Keys {
    good: Vec<ObjectKey>,
    /// Position of each, ascending, and what is wrong.
    bad: Vec<(usize, KeyError)>,
}

impl Keys {
    /// Entries, bad ones included.
    pub(crate) fn len(&self) -> usize {
        self.good.len() + self.bad.len()
    }

    /// The keys that can be asked for, in order.
    pub(crate) fn good(&self) -> &[ObjectKey] {
        &self.good
    }

    /// Every entry, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Result<&ObjectKey, &KeyError>> {
        let mut good = self.good.iter();
        let mut bad = self.bad.iter().peekable();
        (0..self.len()).map_while(
            move |at| match bad.next_if(|(position, _)| *position == at) {
                Some((_, error)) => Some(Err(error)),
                None => good.next().map(Ok),
            },
        )
    }

    /// Answers for [`good`](Self::good) keys, with those of the bad ones put in between.
    pub(crate) fn align<T>(&self, answers: Vec<T>, bad: impl Fn(&KeyError) -> T) -> Vec<T> {
        if self.bad.is_empty() {
            return answers;
        }
        let mut answers = answers.into_iter();
        self.iter()
            .filter_map(|entry| match entry {
                Ok(_) => answers.next(),
                Err(error) => Some(bad(error)),
            })
            .collect()
    }

    /// The entries of several batches, one after the other.
    pub(crate) fn joined<'a>(batches: impl Iterator<Item = &'a Self>) -> Self {
        let mut all = Self::default();
        for keys in batches {
            for key in keys.iter() {
                match key {
                    Ok(key) => all.good.push(key.clone()),
                    Err(error) => all.bad.push((all.len(), error.clone())),
                }
            }
        }
        all
    }

    fn push(&mut self, obj: &Bound<'_, PyAny>) -> PyResult<()> {
        match key(obj)? {
            Ok(key) => self.good.push(key),
            Err(error) => self.bad.push((self.len(), error)),
        }
        Ok(())
    }
}

impl<'py> FromPyObject<'_, 'py> for Keys {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let mut keys = Self::default();
        if let Ok(list) = obj.cast::<PyList>() {
            keys.good.reserve(list.len());
            for item in list.iter() {
                keys.push(&item)?;
            }
        } else if let Ok(tuple) = obj.cast::<PyTuple>() {
            keys.good.reserve(tuple.len());
            for item in tuple.iter_borrowed() {
                keys.push(&item)?;
            }
        } else {
            return Err(wrong_type(&obj, "a list or tuple of keys (str)"));
        }
        Ok(keys)
    }
}

fn key(obj: &Bound<'_, PyAny>) -> PyResult<Result<ObjectKey, KeyError>> {
    if let Ok(text) = obj.cast::<PyString>() {
        let text = text.to_str().map_err(|_| {
            PyTypeError::new_err(
                "a key that UTF-8 can express is needed, not one with lone surrogates",
            )
        })?;
        return Ok(ObjectKey::new(text));
    }
    match obj.cast::<PyBytes>() {
        Ok(bytes) => Ok(ObjectKey::from_utf8(bytes.as_bytes())),
        Err(_) => Err(wrong_type(obj, "a key (str)")),
    }
}

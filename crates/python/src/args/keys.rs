//! Keys of objects.

use layercake_protocol::key::{KeyError, ObjectKey};
use pyo3::Borrowed;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString, PyTuple};

use super::{sequence, wrong_type};
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

    /// How an entry is named to people.
    pub(crate) fn name(&self, index: usize) -> String {
        match self.iter().nth(index) {
            Some(Ok(key)) => key.as_str().to_owned(),
            _ => format!("(entry {index})"),
        }
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
        let items = Items::of(&obj)?;
        keys.good.reserve(items.len());
        items.try_for_each(|item| keys.push(item))?;
        Ok(keys)
    }
}

/// The keys of a batch of calls on open sessions: only looked up by their text, never kept, so all texts are
/// in one piece of memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Names {
    text: String,
    /// Where each ends; one that can't be a key is empty.
    ends: Vec<usize>,
}

impl Names {
    /// Entries, bad ones included.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Every entry, in order; one that can't be a key is empty, and no session's.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &str> {
        let mut start = 0;
        self.ends.iter().map(move |&end| {
            let name = &self.text[start..end];
            start = end;
            name
        })
    }

    /// How an entry is named to people.
    pub(crate) fn name(&self, index: usize) -> String {
        self.iter().nth(index).unwrap_or_default().to_owned()
    }
}

impl<'py> FromPyObject<'_, 'py> for Names {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let mut names = Self::default();
        let items = Items::of(&obj)?;
        names.ends.reserve(items.len());
        items.try_for_each(|item| {
            if let Ok(key) = text_of(item)?
                && ObjectKey::check(key).is_ok()
            {
                names.text.push_str(key);
            }
            names.ends.push(names.text.len());
            Ok(())
        })?;
        Ok(names)
    }
}

/// A sequence of keys; lists and tuples are gone through as they are.
enum Items<'a, 'py> {
    List(&'a Bound<'py, PyList>),
    Tuple(&'a Bound<'py, PyTuple>),
    Others(Vec<Bound<'py, PyAny>>),
}

impl<'a, 'py> Items<'a, 'py> {
    fn of(obj: &'a Bound<'py, PyAny>) -> PyResult<Self> {
        if let Ok(list) = obj.cast::<PyList>() {
            Ok(Self::List(list))
        } else if let Ok(tuple) = obj.cast::<PyTuple>() {
            Ok(Self::Tuple(tuple))
        } else if let Some(items) = sequence(obj)? {
            Ok(Self::Others(items))
        } else {
            Err(wrong_type(obj, "a list or tuple of keys (str)"))
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::List(list) => list.len(),
            Self::Tuple(tuple) => tuple.len(),
            Self::Others(items) => items.len(),
        }
    }

    fn try_for_each(
        &self,
        mut each: impl FnMut(&Bound<'py, PyAny>) -> PyResult<()>,
    ) -> PyResult<()> {
        match self {
            Self::List(list) => list.iter().try_for_each(|item| each(&item)),
            Self::Tuple(tuple) => tuple.iter_borrowed().try_for_each(|item| each(&item)),
            Self::Others(items) => items.iter().try_for_each(each),
        }
    }
}

fn key(obj: &Bound<'_, PyAny>) -> PyResult<Result<ObjectKey, KeyError>> {
    Ok(text_of(obj)?.and_then(ObjectKey::new))
}

/// The text of a key, of any length.
fn text_of<'a>(obj: &'a Bound<'_, PyAny>) -> PyResult<Result<&'a str, KeyError>> {
    if let Ok(text) = obj.cast::<PyString>() {
        let text = text.to_str().map_err(|_| {
            PyTypeError::new_err(
                "a key that UTF-8 can express is needed, not one with lone surrogates",
            )
        })?;
        return Ok(Ok(text));
    }
    let Ok(bytes) = obj.cast::<PyBytes>() else {
        return Err(wrong_type(obj, "a key (str)"));
    };
    let text = str::from_utf8(bytes.as_bytes());
    Ok(text.map_err(|error| KeyError::NotUtf8 {
        valid_up_to: error.valid_up_to(),
    }))
}

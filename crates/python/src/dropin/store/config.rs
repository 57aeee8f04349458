//! `ReplicateConfig`: how objects are placed and kept, as the Mooncake interface says it.
//!
//! One object is shared by all puts of a program, of any thread, and may be changed between two of them: a
//! call takes what it needs before it lets go of the interpreter lock.

use std::time::Duration;

use layercake_protocol::replica::ReplicateConfig;
use parking_lot::Mutex;
use pyo3::Borrowed;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::args::{Flag, Int};
use crate::core::reasons::invalid;

/// The native half of `ReplicateConfig`.
#[pyclass(frozen, subclass, name = "ReplicateConfig", module = "mooncake.store")]
#[derive(Debug, Default)]
pub(crate) struct PyConfig(Mutex<Fields>);

#[derive(Clone, Debug)]
struct Fields {
    replica_num: u64,
    with_hard_pin: bool,
    soft_pin_action: u64,
    soft_pin_ttl_ms: Option<u64>,
    preferred_segment: String,
    preferred_segments: Vec<String>,
    prefer_alloc_in_same_node: bool,
    group_ids: Option<Vec<String>>,
    data_type: u64,
    nof_replica_num: u64,
    dfs_replica_num: u64,
    preferred_nof_segments: Vec<String>,
}

impl Default for Fields {
    fn default() -> Self {
        Self {
            replica_num: 1,
            with_hard_pin: false,
            soft_pin_action: 0,
            soft_pin_ttl_ms: None,
            preferred_segment: String::new(),
            preferred_segments: Vec::new(),
            prefer_alloc_in_same_node: false,
            group_ids: None,
            data_type: 0,
            nof_replica_num: 0,
            dfs_replica_num: 0,
            preferred_nof_segments: Vec::new(),
        }
    }
}

/// Beyond this many milliseconds a life of a soft pin is a slip.
const LONGEST_TTL: u64 = i64::MAX.unsigned_abs();

impl Fields {
    /// Why they can't be those of a put of so many keys.
    fn refused(&self, keys: usize) -> Option<String> {
        // Replicas on drives of other hosts and in file systems: there are none here.
        for (name, count) in [
            ("nof_replica_num", self.nof_replica_num),
            ("dfs_replica_num", self.dfs_replica_num),
        ] {
            if count > 0 {
                return Some(format!(
                    "{name} is {count}: only replicas in memory are supported, set it to 0"
                ));
            }
        }
        if self.replica_num == 0 {
            return Some("replica_num is 0: at least 1 is needed".to_owned());
        }
        match &self.group_ids {
            Some(ids) if ids.len() != keys => {
                return Some(format!(
                    "group_ids has {} entries: {keys} keys need one each",
                    ids.len()
                ));
            }
            _ => {}
        }
        match self.soft_pin_ttl_ms {
            Some(_) if self.soft_pin_action != ENABLE => {
                Some("soft_pin_ttl_ms is set: soft_pin_action has to be ENABLE with it".to_owned())
            }
            Some(ttl) if ttl > LONGEST_TTL => Some(format!(
                "soft_pin_ttl_ms is {ttl}: at most {LONGEST_TTL} is accepted"
            )),
            _ => None,
        }
    }
}

/// Values of `SoftPinAction`.
const PRESERVE: u64 = 0;
const ENABLE: u64 = 1;

/// What a put makes of it.
#[derive(Clone, Debug, Default)]
pub(super) struct Plan {
    pub(super) config: ReplicateConfig,
    /// One for each key, or none.
    pub(super) groups: Vec<Option<String>>,
}

impl Plan {
    /// The plan for a put of so many keys, or the code that all of them are answered with.
    pub(super) fn new(config: Option<&Bound<'_, PyConfig>>, keys: usize) -> Result<Self, i64> {
        let fields = config.map_or_else(Fields::default, |config| config.get().0.lock().clone());
        if let Some(reason) = fields.refused(keys) {
            return Err(invalid(format_args!("config: {reason}")));
        }
        let groups = fields.group_ids.unwrap_or_default();
        let soft_pin = fields.soft_pin_action == ENABLE;
        let first = Some(fields.preferred_segment).filter(|name| !name.is_empty());
        Ok(Self {
            config: ReplicateConfig {
                replicas: u32::try_from(fields.replica_num).unwrap_or(u32::MAX),
                preferred_segments: first.into_iter().chain(fields.preferred_segments).collect(),
                prefer_same_node: fields.prefer_alloc_in_same_node,
                soft_pin,
                soft_pin_ttl: fields.soft_pin_ttl_ms.map(Duration::from_millis),
                keep_soft_pin: fields.soft_pin_action == PRESERVE,
                hard_pin: fields.with_hard_pin,
            },
            groups: groups
                .into_iter()
                .map(|group| Some(group).filter(|group| !group.is_empty()))
                .collect(),
        })
    }

    pub(super) fn group(&self, index: usize) -> Option<String> {
        self.groups.get(index).cloned().flatten()
    }
}

/// A list or tuple of `str`, and not one `str`, which is a sequence of them too.
struct Names(Vec<String>);

impl<'py> FromPyObject<'_, 'py> for Names {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if obj.is_instance_of::<PyString>() {
            return Err(PyTypeError::new_err("a list of str is needed, not a str"));
        }
        obj.extract().map(Self)
    }
}

#[pymethods]
impl PyConfig {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Number of replicas, each in another segment.
    #[getter]
    fn replica_num(&self) -> u64 {
        self.0.lock().replica_num
    }

    #[setter]
    fn set_replica_num(&self, value: Int) {
        self.0.lock().replica_num = value.0;
    }

    /// Never evict.
    #[getter]
    fn with_hard_pin(&self) -> bool {
        self.0.lock().with_hard_pin
    }

    #[setter]
    fn set_with_hard_pin(&self, value: Flag) {
        self.0.lock().with_hard_pin = value.0;
    }

    #[getter]
    fn _soft_pin_action(&self) -> u64 {
        self.0.lock().soft_pin_action
    }

    #[setter(_soft_pin_action)]
    fn set_soft_pin_action(&self, value: Int) {
        self.0.lock().soft_pin_action = value.0;
    }

    /// Life of the soft pin in milliseconds; ``None``: the master's default.
    #[getter]
    fn soft_pin_ttl_ms(&self) -> Option<u64> {
        self.0.lock().soft_pin_ttl_ms
    }

    #[setter]
    fn set_soft_pin_ttl_ms(&self, value: Option<Int>) {
        self.0.lock().soft_pin_ttl_ms = value.map(|value| value.0);
    }

    /// Name of the segment to try first.
    #[getter]
    fn preferred_segment(&self) -> String {
        self.0.lock().preferred_segment.clone()
    }

    #[setter]
    fn set_preferred_segment(&self, value: String) {
        self.0.lock().preferred_segment = value;
    }

    /// Names of the segments to try first, best first.
    #[getter]
    fn preferred_segments(&self) -> Vec<String> {
        self.0.lock().preferred_segments.clone()
    }

    #[setter]
    fn set_preferred_segments(&self, value: Names) {
        self.0.lock().preferred_segments = value.0;
    }

    /// Prefer memory of this process, then of this host.
    #[getter]
    fn prefer_alloc_in_same_node(&self) -> bool {
        self.0.lock().prefer_alloc_in_same_node
    }

    #[setter]
    fn set_prefer_alloc_in_same_node(&self, value: Flag) {
        self.0.lock().prefer_alloc_in_same_node = value.0;
    }

    /// One id for each key of a put: objects of one id are evicted together.
    #[getter]
    fn group_ids(&self) -> Option<Vec<String>> {
        self.0.lock().group_ids.clone()
    }

    #[setter]
    fn set_group_ids(&self, value: Option<Names>) {
        self.0.lock().group_ids = value.map(|names| names.0);
    }

    #[getter]
    fn _data_type(&self) -> u64 {
        self.0.lock().data_type
    }

    #[setter(_data_type)]
    fn set_data_type(&self, value: Int) {
        self.0.lock().data_type = value.0;
    }

    /// Replicas on drives of other hosts: only 0 is accepted by the calls.
    #[getter]
    fn nof_replica_num(&self) -> u64 {
        self.0.lock().nof_replica_num
    }

    #[setter]
    fn set_nof_replica_num(&self, value: Int) {
        self.0.lock().nof_replica_num = value.0;
    }

    /// Replicas in a distributed file system: only 0 is accepted by the calls.
    #[getter]
    fn dfs_replica_num(&self) -> u64 {
        self.0.lock().dfs_replica_num
    }

    #[setter]
    fn set_dfs_replica_num(&self, value: Int) {
        self.0.lock().dfs_replica_num = value.0;
    }

    /// Names of drives to try first.
    #[getter]
    fn preferred_nof_segments(&self) -> Vec<String> {
        self.0.lock().preferred_nof_segments.clone()
    }

    #[setter]
    fn set_preferred_nof_segments(&self, value: Names) {
        self.0.lock().preferred_nof_segments = value.0;
    }
}

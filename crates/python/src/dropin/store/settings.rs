//! From the arguments of `setup` to the settings of a member.

use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use layercake_protocol::code::ResultCode;
use layercake_protocol::key::Tenant;
use layercake_store::StoreError;
use layercake_store::link::Timeouts;
use pyo3::Borrowed;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyString};
use thiserror::Error;
use tokio::net::TcpStream;

use crate::args::Int;
use crate::core::{EngineSettings, MemberName, SharedEngine, StoreCore, StoreSettings};
use crate::dropin::engine::PyInnerTransferEngine;
use crate::dropin::member::{self, Unsupported};

/// Where Mooncake's master listens by default, and how much memory a dict without a size means.
const DEFAULT_MASTER: &str = "127.0.0.1:50051";
const DEFAULT_CAPACITY: u64 = 16 << 20;

/// Less than this can't be lent.
const LEAST_CAPACITY: u64 = 4096;

/// How long one message to the master may take, and one attempt to connect: callers look up keys while an
/// engine's scheduler waits.
const CALL_WITHIN: Duration = Duration::from_secs(2);

/// How long `setup` waits for a master that is being started, unless `LAYERCAKE_SETUP_TIMEOUT` says so.
const MASTER_WITHIN: Duration = Duration::from_secs(2);
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Bytes of lent memory that are touched in a second, on a slow machine.
const TOUCHED_PER_SECOND: u64 = 256 << 20;

/// Why a store can't be set up like that.
#[derive(Debug, Error)]
pub(super) enum Refused {
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    #[error("{0}")]
    Setting(String),
}

impl Refused {
    pub(super) fn code(&self) -> i64 {
        let code = match self {
            Self::Unsupported(Unsupported::Protocol { .. } | Unsupported::Rdma) => {
                ResultCode::FAILED
            }
            _ => ResultCode::INVALID_ARGUMENT,
        };
        code.as_result()
    }
}

/// What `setup` is told, as far as it matters.
#[derive(Debug)]
pub(super) struct Arguments {
    pub(super) local_hostname: String,
    pub(super) metadata_server: String,
    pub(super) capacity: u64,
    pub(super) protocol: String,
    pub(super) master: String,
    pub(super) offload: bool,
    pub(super) tenant: String,
    pub(super) http: bool,
}

/// An argument that has no default.
pub(super) fn needed<T>(name: &str, value: Option<T>) -> PyResult<T> {
    value.ok_or_else(|| PyTypeError::new_err(format!("setup() needs the argument {name}")))
}

/// The keys of a configuration, the first two of which are needed.
const KEYS: [&str; 15] = [
    "local_hostname",
    "metadata_server",
    "global_segment_size",
    "local_buffer_size",
    "protocol",
    "rdma_devices",
    "device_name",
    "master_server_addr",
    "master_server_address",
    "ipc_socket_path",
    "enable_ssd_offload",
    "ssd_offload_path",
    "tenant_id",
    "enable_client_http_server",
    "client_http_port",
];

impl Arguments {
    /// From a configuration, whose values may be texts.
    pub(super) fn of_dict(dict: &Bound<'_, PyDict>) -> PyResult<Result<Self, Refused>> {
        for (key, _) in dict.iter() {
            let key: String = key.extract()?;
            if !KEYS.contains(&key.as_str()) {
                return Ok(Err(Refused::Setting(format!(
                    "the configuration has an unknown key {key:?}; known are {}",
                    KEYS.join(", ")
                ))));
            }
        }
        match Self::read(dict) {
            // What a text means is a matter of values, as with other codes.
            Err(error) if error.is_instance_of::<PyValueError>(dict.py()) => {
                Ok(Err(Refused::Setting(error.to_string())))
            }
            read => read.map(Ok),
        }
    }

    fn read(dict: &Bound<'_, PyDict>) -> PyResult<Self> {
        let get = |key: &str| dict.get_item(key);
        let text = |key: &str| get(key)?.map(|value| value.extract::<String>()).transpose();
        let flag = |key: &str| {
            get(key)?.map_or(Ok(false), |value| {
                value.extract::<Truth>().map(|flag| flag.0)
            })
        };
        let must = |key: &str| {
            text(key)?
                .ok_or_else(|| PyValueError::new_err(format!("the configuration needs {key}")))
        };
        let master = match text("master_server_addr")? {
            Some(master) => Some(master),
            None => text("master_server_address")?,
        };
        let capacity = get("global_segment_size")?.map(|size| size.extract::<Bytes>());
        // Only checked: values are not staged.
        get("local_buffer_size")?
            .map(|size| size.extract::<Bytes>())
            .transpose()?;
        Ok(Self {
            local_hostname: must("local_hostname")?,
            metadata_server: must("metadata_server")?,
            capacity: capacity
                .transpose()?
                .map_or(DEFAULT_CAPACITY, |size| size.0),
            protocol: text("protocol")?.unwrap_or_else(|| "tcp".to_owned()),
            master: master.unwrap_or_else(|| DEFAULT_MASTER.to_owned()),
            offload: flag("enable_ssd_offload")?,
            tenant: text("tenant_id")?.unwrap_or_else(|| "default".to_owned()),
            http: flag("enable_client_http_server")?,
        })
    }

    /// The member's settings; names are looked up. `shared`: those of an engine that there is already.
    pub(super) fn settings(
        &self,
        shared: Option<&EngineSettings>,
    ) -> Result<StoreSettings, Refused> {
        let host = self.local_hostname.as_str();
        if host.is_empty() {
            return Err(Refused::Setting(
                "local_hostname is empty: the name or address that others reach this process by is needed".to_owned(),
            ));
        }
        member::check_metadata(&self.metadata_server)?;
        member::check_protocol(&self.protocol)?;
        if let Some((scheme, _)) = self.master.split_once("://") {
            return Err(Refused::Setting(format!(
                "master_server_addr is {:?}: {scheme} is not supported, host:port of the master is needed",
                self.master
            )));
        }
        for (given, name) in [
            (self.offload, "enable_ssd_offload"),
            (self.http, "enable_client_http_server"),
        ] {
            if given {
                tracing::warn!("{name} has no effect: Layercake has no such thing yet");
            }
        }
        let engine = match shared {
            Some(settings) => settings.clone(),
            None => member::settings(host)?,
        };
        let tenant = Tenant::new(&self.tenant)
            .map_err(|error| Refused::Setting(format!("tenant_id {:?}: {error}", self.tenant)))?;
        let has_port = host
            .rsplit_once(':')
            .is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let name = host.to_owned();
        let capacity = if self.capacity < LEAST_CAPACITY {
            0
        } else {
            self.capacity
        };
        let default = StoreSettings::client(self.master.clone(), engine);
        Ok(StoreSettings {
            name: if has_port {
                MemberName::Given(name)
            } else {
                MemberName::AtPort(name)
            },
            tenant,
            capacity,
            timeouts: Timeouts {
                connect: CALL_WITHIN,
                call: CALL_WITHIN,
                ..default.timeouts
            },
            ready_within: default.ready_within + Duration::from_secs(capacity / TOUCHED_PER_SECOND),
            ..default
        })
    }
}

/// Joins, once the master is there.
pub(super) async fn open(
    settings: StoreSettings,
    shared: Option<SharedEngine>,
) -> Result<Arc<StoreCore>, StoreError> {
    let until = Instant::now() + master_within();
    while TcpStream::connect(&settings.master).await.is_err() && Instant::now() < until {
        tokio::time::sleep(LOOK_AGAIN).await;
    }
    let tenant = settings.tenant.clone();
    let core = StoreCore::open(settings, shared).await?;
    if tenant != Tenant::default() && core.client().link().shares_tenants() {
        tracing::warn!(%tenant, "the master puts all tenants' keys into one key space");
    }
    Ok(core)
}

fn master_within() -> Duration {
    let seconds = std::env::var("LAYERCAKE_SETUP_TIMEOUT").ok();
    let seconds = seconds.and_then(|text| text.parse().ok());
    seconds
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .unwrap_or(MASTER_WITHIN)
}

/// The engine that a store shares, if it is given one.
pub(super) fn engine(given: Option<&Bound<'_, PyAny>>) -> PyResult<Option<SharedEngine>> {
    let Some(given) = given else {
        return Ok(None);
    };
    let inner = given.cast::<PyInnerTransferEngine>().map_err(|_| {
        PyTypeError::new_err("engine is not what TransferEngine.get_engine() gives")
    })?;
    inner.get().shared().map(Some)
}

/// A number of bytes: an int, or a text with digits and, if need be, a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bytes(pub(super) u64);

impl<'py> FromPyObject<'_, 'py> for Bytes {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match obj.cast::<PyString>() {
            Ok(text) => text
                .to_string_lossy()
                .parse()
                .map_err(PyValueError::new_err),
            Err(_) => obj.extract::<Int>().map(|int| Self(int.0)),
        }
    }
}

impl FromStr for Bytes {
    type Err = String;

    /// Units are powers of two, whatever they are called, as in Mooncake's configuration.
    fn from_str(text: &str) -> Result<Self, String> {
        let lower = text.trim().to_ascii_lowercase();
        let digits = lower
            .bytes()
            .take_while(|byte| byte.is_ascii_digit() || *byte == b'.')
            .count();
        let (number, unit) = (&lower[..digits], lower[digits..].trim());
        let shift = match unit {
            "" | "b" => Some(0),
            "k" | "kb" | "kib" => Some(10),
            "m" | "mb" | "mib" => Some(20),
            "g" | "gb" | "gib" => Some(30),
            "t" | "tb" | "tib" => Some(40),
            _ => None,
        };
        let bytes = shift.and_then(|shift: u32| match number.parse::<u64>() {
            Ok(number) => number.checked_mul(1 << shift),
            Err(_) => fraction(number, shift),
        });
        bytes.map(Self).ok_or_else(|| {
            format!(
                "{text:?} is no size: a number with a unit is needed, such as \"16MB\" or \"4GB\""
            )
        })
    }
}

fn fraction(number: &str, shift: u32) -> Option<u64> {
    let bytes = number.parse::<f64>().ok()? * f64::from(shift).exp2();
    // Sizes that lose digits here are larger than any memory.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the digits had no sign, and the bound was checked"
    )]
    (bytes < 2_f64.powi(63)).then_some(bytes as u64)
}

/// A bool, or a text that says one.
struct Truth(bool);

impl<'py> FromPyObject<'_, 'py> for Truth {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if obj.is_instance_of::<PyBool>() {
            return obj.is_truthy().map(Self);
        }
        let text = obj.extract::<String>()?;
        match text.to_ascii_lowercase().as_str() {
            "true" | "1" | "yes" | "on" => Ok(Self(true)),
            "false" | "0" | "no" | "off" | "" => Ok(Self(false)),
            _ => Err(PyValueError::new_err(format!(
                "{text:?} is neither true nor false"
            ))),
        }
    }
}

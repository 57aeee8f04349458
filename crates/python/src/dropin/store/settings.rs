//! From the arguments of `setup` to the settings of a member.

use std::sync::Arc;
use std::time::Duration;

use layercake_master::mooncake::parse_size;
use layercake_protocol::code::ResultCode;
use layercake_protocol::key::Tenant;
use layercake_store::StoreError;
use layercake_store::link::Timeouts;
use pyo3::Borrowed;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFloat, PyString};
use thiserror::Error;
use tokio::net::TcpStream;

use crate::args::{Flag, Int};
use crate::core::{EngineSettings, Keeper, MemberName, SharedEngine, StoreCore, StoreSettings};
use crate::dropin::engine::PyInnerTransferEngine;
use crate::dropin::member::{self, Unsupported};

/// Where Mooncake's master listens by default, and how much memory a dict without a size means.
const DEFAULT_MASTER: &str = "127.0.0.1:50051";
const DEFAULT_CAPACITY: u64 = 16 << 20;

/// What the configuration leaves out, and the signature of `setup` names.
pub(super) const DEFAULT_TENANT: &str = "default";
pub(super) const DEFAULT_HTTP_PORT: u64 = 9300;

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
    /// Of the HTTP server that there is not: only checked.
    pub(super) http_port: u64,
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

/// Keys of configurations that mean something to others only.
const IGNORED: [&str; 1] = ["mode"];

/// A value of a configuration; a wrong one is refused by the name of its key.
fn named<'py, T>(key: &str, value: &Bound<'py, PyAny>) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    value.extract::<T>().map_err(|error| {
        let text = format!("{key}: {}", error.value(value.py()));
        if error.is_instance_of::<PyTypeError>(value.py()) {
            PyTypeError::new_err(text)
        } else {
            PyValueError::new_err(text)
        }
    })
}

/// A size in a configuration. JSON knows no integers: a float without a fraction is one. What is none is a wrong value.
fn size_of(key: &str, value: &Bound<'_, PyAny>) -> PyResult<u64> {
    let whole = match value.cast::<PyFloat>() {
        Ok(float) if float.call_method0("is_integer")?.is_truthy()? => {
            Some(float.call_method0("__int__")?)
        }
        _ => None,
    };
    let value = whole.as_ref().unwrap_or(value);
    named::<Bytes>(key, value)
        .map(|size| size.0)
        .map_err(|error| PyValueError::new_err(error.value(value.py()).to_string()))
}

impl Arguments {
    /// From a configuration, whose values may be texts. `None` stands for a key that is not there.
    pub(super) fn of_dict(dict: &Bound<'_, PyDict>) -> PyResult<Result<Self, Refused>> {
        for (key, _) in dict.iter() {
            let Ok(key) = key.extract::<String>() else {
                return Err(PyTypeError::new_err(format!(
                    "the configuration has the key {}: keys are str",
                    key.repr()?
                )));
            };
            if IGNORED.contains(&key.as_str()) {
                tracing::warn!("{key} in the configuration has no effect");
                continue;
            }
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
        let get = |key: &str| Ok::<_, PyErr>(dict.get_item(key)?.filter(|value| !value.is_none()));
        let text = |key: &str| get(key)?.map(|value| named(key, &value)).transpose();
        let flag = |key: &str| {
            get(key)?.map_or(Ok(false), |value| {
                named::<Truth>(key, &value).map(|truth| truth.0)
            })
        };
        let size = |key: &str| get(key)?.map(|value| size_of(key, &value)).transpose();
        let must = |key: &str| {
            text(key)?
                .ok_or_else(|| PyValueError::new_err(format!("the configuration needs {key}")))
        };
        let master = match text("master_server_addr")? {
            Some(master) => Some(master),
            None => text("master_server_address")?,
        };
        let capacity = size("global_segment_size")?;
        let http_port =
            get("client_http_port")?.map(|port| named::<Port>("client_http_port", &port));
        // Only checked: values are not staged.
        size("local_buffer_size")?;
        Ok(Self {
            local_hostname: must("local_hostname")?,
            metadata_server: must("metadata_server")?,
            capacity: capacity.unwrap_or(DEFAULT_CAPACITY),
            protocol: text("protocol")?.unwrap_or_else(|| "tcp".to_owned()),
            master: master.unwrap_or_else(|| DEFAULT_MASTER.to_owned()),
            offload: flag("enable_ssd_offload")?,
            tenant: text("tenant_id")?.unwrap_or_else(|| DEFAULT_TENANT.to_owned()),
            http: flag("enable_client_http_server")?,
            http_port: http_port
                .transpose()?
                .map_or(DEFAULT_HTTP_PORT, |port| port.0),
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
        check_address(&self.master)?;
        if (1..LEAST_CAPACITY).contains(&self.capacity) {
            return Err(Refused::Setting(format!(
                "global_segment_size is {}: at least {LEAST_CAPACITY} bytes can be lent, or 0",
                self.capacity
            )));
        }
        if u16::try_from(self.http_port).is_err() {
            return Err(Refused::Setting(format!(
                "client_http_port is {}: a port from 0 to 65535 is needed",
                self.http_port
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
        let tenant = match self.tenant.as_str() {
            "" => DEFAULT_TENANT,
            tenant => tenant,
        };
        let tenant = Tenant::new(tenant)
            .map_err(|error| Refused::Setting(format!("tenant_id {:?}: {error}", self.tenant)))?;
        let has_port = host
            .rsplit_once(':')
            .is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let name = host.to_owned();
        let default = StoreSettings::client(self.master.clone(), engine);
        Ok(StoreSettings {
            name: if has_port {
                MemberName::Given(name)
            } else {
                MemberName::AtPort(name)
            },
            tenant,
            capacity: self.capacity,
            timeouts: Timeouts {
                connect: CALL_WITHIN,
                call: CALL_WITHIN,
                ..default.timeouts
            },
            ready_within: default.ready_within
                + Duration::from_secs(self.capacity / TOUCHED_PER_SECOND),
            ..default
        })
    }
}

/// Refuses what can't be the address of a master, before anybody waits for it.
fn check_address(address: &str) -> Result<(), Refused> {
    let parts = address.rsplit_once(':');
    let good = parts.is_some_and(|(host, port)| {
        !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0)
    });
    if good {
        return Ok(());
    }
    Err(Refused::Setting(format!(
        "master_server_addr is {address:?}: host:port of the master is needed, with a port from 1 to 65535"
    )))
}

/// As [`Arguments::settings`], on a thread of its own: looking names up may take as long as name servers like.
pub(super) async fn read(
    arguments: Arguments,
    shared: Option<EngineSettings>,
) -> Result<StoreSettings, Refused> {
    let read = tokio::task::spawn_blocking(move || arguments.settings(shared.as_ref())).await;
    read.unwrap_or_else(|error| {
        Err(Refused::Setting(format!(
            "an internal task failed: {error}"
        )))
    })
}

/// Joins, once the master is there.
pub(super) async fn open(
    settings: StoreSettings,
    shared: Option<SharedEngine>,
) -> Result<Arc<StoreCore>, StoreError> {
    // Not longer, whatever an attempt hangs at: a name server, or a host that drops packets. Why there is no
    // connection the link finds out and says.
    let there = async {
        while TcpStream::connect(&settings.master).await.is_err() {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    };
    let there = tokio::time::timeout(master_within(), there).await;
    tracing::debug!(in_time = there.is_ok(), "the master was waited for");
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

/// The engine that a store shares, if it is given one, and what the Python object of the store must keep.
pub(super) fn engine(given: Option<&Bound<'_, PyAny>>) -> PyResult<Option<(SharedEngine, Keeper)>> {
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
            Ok(text) => {
                let text = text.to_string_lossy();
                let size = parse_size(&text).ok_or_else(|| {
                    PyValueError::new_err(format!(
                        "{text:?} is no size: a number with a unit is needed, such as \"16MB\" or \"4GB\""
                    ))
                });
                size.map(Self)
            }
            Err(_) => obj.extract::<Int>().map(|int| Self(int.0)),
        }
    }
}

/// The number of a port: an int, or a text with its digits. What is no port is refused later, with the values.
struct Port(u64);

impl<'py> FromPyObject<'_, 'py> for Port {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let Ok(text) = obj.cast::<PyString>() else {
            return obj.extract::<Int>().map(|int| Self(int.0));
        };
        let text = text.to_string_lossy();
        text.trim().parse().map(Self).map_err(|_| {
            PyValueError::new_err(format!("client_http_port is {text:?}: a port is needed"))
        })
    }
}

/// A flag as the signature of `setup` takes it, or a text that says one.
struct Truth(bool);

impl<'py> FromPyObject<'_, 'py> for Truth {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let Ok(text) = obj.cast::<PyString>() else {
            return obj.extract::<Flag>().map(|flag| Self(flag.0));
        };
        let text = text.to_string_lossy();
        match text.to_ascii_lowercase().as_str() {
            "true" | "1" | "yes" | "on" => Ok(Self(true)),
            "false" | "0" | "no" | "off" | "" => Ok(Self(false)),
            _ => Err(PyValueError::new_err(format!(
                "{text:?} is neither true nor false"
            ))),
        }
    }
}

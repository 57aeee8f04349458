//! Keys of Mooncake's JSON configuration, as vLLM, vLLM-Ascend, `SGLang` and Mooncake's own service read them.

use layercake_master::mooncake::parse_size;
use serde_json::{Map, Value};

use super::{Finding, Place, Verdict};

/// A key, and what becomes of its value.
struct Key {
    name: &'static str,
    judge: fn(&str) -> Verdict,
}

fn used(text: &str) -> Verdict {
    Verdict::Used(text.to_owned())
}

fn no_effect(text: &str) -> Verdict {
    Verdict::NoEffect(text.to_owned())
}

fn replaced(text: &str) -> Verdict {
    Verdict::Replaced(text.to_owned())
}

fn refused(text: &str) -> Verdict {
    Verdict::Refused(text.to_owned())
}

/// Whether a text switches something on; `None`: it is no switch.
pub(super) fn switch(text: &str) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" | "on" | "enable" => Some(true),
        "" | "false" | "0" | "no" | "off" | "disable" => Some(false),
        _ => None,
    }
}

/// What is only accepted switched off.
fn off(text: &str, instead: &str) -> Verdict {
    match switch(text) {
        Some(false) => no_effect("off, as it has to be"),
        Some(true) => refused(instead),
        None => refused("true or false is accepted"),
    }
}

pub(super) fn protocol(text: &str) -> Verdict {
    match text.to_ascii_lowercase().as_str() {
        "tcp" | "" => used("TCP between hosts, shared memory between processes of one"),
        "rdma" => refused(
            "RDMA is not built in: write \"tcp\", or set MC_FORCE_TCP=1 to have \"rdma\" mean that",
        ),
        "ascend" => refused("transfers of NPU memory are not built in: write \"tcp\""),
        _ => refused("write \"tcp\""),
    }
}

pub(super) fn metadata(text: &str) -> Verdict {
    if text == "P2PHANDSHAKE" {
        used("engines find each other by address")
    } else if text.starts_with("http://") || text.starts_with("https://") {
        used(
            "transfer engines leave their names there; the clients of a store are known to its master",
        )
    } else {
        refused("write \"P2PHANDSHAKE\": engines find each other by address, without etcd or Redis")
    }
}

pub(super) fn device(text: &str) -> Verdict {
    if text.is_empty() {
        no_effect("no device is named, and none is needed")
    } else {
        no_effect("it names RDMA devices; TCP uses the address of local_hostname")
    }
}

pub(super) fn size(text: &str) -> Verdict {
    match parse_size(text) {
        Some(_) => used("memory that the process lends to the store; 0: it only reads and writes"),
        None => refused("a number of bytes, or a text such as \"4GB\" is accepted"),
    }
}

pub(super) fn master(text: &str) -> Verdict {
    if text.contains("://") {
        return refused("write host:port of the master: there is no etcd to look it up in");
    }
    match text.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
            used("where the master is")
        }
        _ => refused("write host:port of the master"),
    }
}

pub(super) fn tenant(_: &str) -> Verdict {
    used("the key space, at a master with --enable_multi_tenants; elsewhere all tenants share one")
}

pub(super) fn offload(text: &str) -> Verdict {
    off(text, "objects are kept in memory only: switch it off")
}

/// Memory that Mooncake copies values through.
const STAGED: &str =
    "values are not staged: they move straight between the caller's memory and the store's";

const KEYS: &[Key] = &[
    Key {
        name: "alloc_in_same_node",
        judge: |_| used("read by vLLM-Ascend, which passes it on with each put"),
    },
    Key {
        name: "check_server",
        judge: |_| used("read by SGLang alone"),
    },
    Key {
        name: "client_http_port",
        judge: |_| no_effect("clients have no HTTP port: see /metrics of the master"),
    },
    Key {
        name: "client_server_address",
        judge: |_| {
            refused(
                "there is no separate client process: leave it out, each engine is a client itself",
            )
        },
    },
    Key {
        name: "device_name",
        judge: device,
    },
    Key {
        name: "enable_client_http_server",
        judge: |text| match switch(text) {
            Some(false) => no_effect("off"),
            Some(true) => replaced(
                "clients have no HTTP port: /metrics and /get_segments_detail of the master show them",
            ),
            None => refused("true or false is accepted"),
        },
    },
    Key {
        name: "enable_offload",
        judge: offload,
    },
    Key {
        name: "enable_ssd_offload",
        judge: offload,
    },
    Key {
        name: "global_segment_size",
        judge: size,
    },
    Key {
        name: "ipc_socket_path",
        judge: |_| replaced("processes of one host find each other's memory by themselves"),
    },
    Key {
        name: "local_buffer_size",
        judge: |_| no_effect(STAGED),
    },
    Key {
        name: "local_hostname",
        judge: |text| {
            if text.trim().is_empty() {
                refused("the name or address that others reach this host by is needed")
            } else {
                used("the address to listen on, and to tell others")
            }
        },
    },
    Key {
        name: "master_metrics_port",
        judge: |_| used("read by SGLang, which asks the master's HTTP port"),
    },
    Key {
        name: "master_server_addr",
        judge: master,
    },
    Key {
        name: "master_server_address",
        judge: master,
    },
    Key {
        name: "metadata_server",
        judge: metadata,
    },
    Key {
        name: "mode",
        judge: |text| match text {
            "embedded" => used("read by vLLM: each worker lends memory"),
            "standalone-store" => used(
                "read by vLLM: workers lend nothing; start mooncake.mooncake_store_service or layercake node for the memory",
            ),
            _ => refused("\"embedded\" and \"standalone-store\" are accepted"),
        },
    },
    Key {
        name: "protocol",
        judge: protocol,
    },
    Key {
        name: "rdma_devices",
        judge: device,
    },
    Key {
        name: "ssd_offload_path",
        judge: |_| no_effect("it belongs to the tier on disks, which is off"),
    },
    Key {
        name: "standalone_storage",
        judge: |text| {
            off(
                text,
                "there is no separate client process: leave it out, each engine is a client itself",
            )
        },
    },
    Key {
        name: "tenant_id",
        judge: tenant,
    },
    Key {
        name: "transfer_timeout",
        judge: |_| {
            replaced("a peer that shows no progress for 2 s fails the transfer, and 30 s bound it")
        },
    },
    Key {
        name: "use_ascend_direct",
        judge: |text| {
            off(
                text,
                "transfers of NPU memory are not built in: switch it off",
            )
        },
    },
];

/// Verdicts on the keys of a file.
pub(super) fn judge(file: Map<String, Value>) -> Vec<Finding> {
    let findings = file.into_iter().map(|(name, value)| {
        let text = match value {
            Value::String(text) => Some(text),
            Value::Null => Some(String::new()),
            Value::Bool(_) | Value::Number(_) => Some(value.to_string()),
            Value::Array(_) | Value::Object(_) => None,
        };
        let verdict = match (KEYS.iter().find(|key| key.name == name), &text) {
            (None, _) => Verdict::unknown(&name, KEYS.iter().map(|key| key.name)),
            (Some(_), None) => refused("a text, a number or a switch is accepted"),
            (Some(key), Some(text)) => (key.judge)(text),
        };
        Finding {
            place: Place::File,
            name,
            value: Some(text.unwrap_or_else(|| "{…}".to_owned())),
            verdict,
        }
    });
    findings.collect()
}

/// Every key, with the verdict on its commonest value.
pub(super) fn known() -> impl Iterator<Item = (Place, &'static str, Verdict)> {
    KEYS.iter().map(|key| {
        let value = match key.name {
            "global_segment_size" => "4GB",
            "local_hostname" => "localhost",
            "master_server_addr" | "master_server_address" => "127.0.0.1:50051",
            "metadata_server" => "P2PHANDSHAKE",
            "mode" => "embedded",
            _ => "",
        };
        (Place::File, key.name, (key.judge)(value))
    })
}

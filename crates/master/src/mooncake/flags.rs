//! Every flag of `mooncake_master`, and what becomes of it.
//!
//! One table for the command itself and for the tools that judge an existing deployment: a flag is used,
//! accepted without effect, or accepted only with values that ask for nothing this master lacks.
//! None is dropped in silence: [`Effect`] has the text for people.

use super::values;

/// What a flag's value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `true` or `false`; the flag alone means true, and with `no` in front of its name false.
    Switch,
    /// A whole number from 0.
    Number,
    /// A number that may have a fraction.
    Fraction,
    /// A time: milliseconds, or a number with one of the units ms, s, m and h.
    Time,
    /// Any text.
    Text,
}

/// What becomes of a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It sets what the text says.
    Used(&'static str),
    /// It is accepted and changes nothing, because of what the text says.
    Ignored(&'static str),
    /// Only these values are accepted, and change nothing; the text says what there is instead of others.
    Only(&'static [&'static str], &'static str),
}

/// A flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flag {
    /// Its name, without dashes.
    pub name: &'static str,
    /// What its value is.
    pub kind: Kind,
    /// What becomes of it.
    pub effect: Effect,
}

const fn flag(name: &'static str, kind: Kind, effect: Effect) -> Flag {
    Flag { name, kind, effect }
}

use Effect::{Ignored, Only, Used};
use Kind::{Fraction, Number, Switch, Text, Time};

const OFF: &[&str] = &["false"];
const EMPTY: &[&str] = &[""];
const ALLOCATOR: &str = "there is one allocator, with exact sizes in 4 KiB granules";
const THREADS: &str = "there is a thread for every two cores, whatever the number of connections";
const NO_DISK: &str = "objects are kept in memory only: leave it off";
const DISK_OFF: &str = "it belongs to the tier on disks, which is off";
const NO_HA: &str = "there is one master without a standby: leave it off; clients reconnect to a restarted master by themselves";
const HA_OFF: &str = "it belongs to high availability, which is off";
const NO_SNAPSHOT: &str =
    "a restarted master begins empty, as one without snapshots does: leave it off";
const SNAPSHOT_OFF: &str = "it belongs to snapshots, which are off";
const NO_CXL: &str = "segments are host memory: leave it off";
const CXL_OFF: &str = "it belongs to CXL memory, which is off";
const NO_EVENTS: &str = "events of the store are not published: leave it off";
const EVENTS_OFF: &str = "it belongs to the publisher of events, which is off";
const NO_FANOUT: &str =
    "replicas are made by the writer (ReplicateConfig.replica_num) and by copy tasks: leave it off";
const FANOUT_OFF: &str = "it belongs to dynamic replication, which is off";
const TASKS: &str = "copy and move tasks are bounded by the client that runs them";
const COMPLETION: &str =
    "it belongs to the completion of command lines, which shells do themselves";
const IN_FILE: &str = "write the flags into a YAML file and give --config_path";
const LOGGING: &str = "logs go to standard error; LAYERCAKE_LOG sets their level";

/// All flags, by name.
pub const FLAGS: &[Flag] = &[
    flag(
        "allocation_strategy",
        Text,
        Used(
            "which segment a new object goes to: random, free_ratio_first or local_first; by default the roomier of two random ones",
        ),
    ),
    flag(
        "allow_evict_soft_pinned_objects",
        Switch,
        Used("whether soft-pinned objects are evicted when nothing else is left"),
    ),
    flag("alsologtoemail", Text, Ignored(LOGGING)),
    flag("alsologtostderr", Switch, Ignored(LOGGING)),
    flag("batch_oplog_retry_timeout_sec", Number, Ignored(HA_OFF)),
    flag(
        "client_ttl",
        Number,
        Used("seconds without a heartbeat after which a client is gone"),
    ),
    flag(
        "cluster_id",
        Text,
        Ignored("it names the cluster in the store of high availability, which is off"),
    ),
    flag("colorlogtostderr", Switch, Ignored(LOGGING)),
    flag(
        "config_path",
        Text,
        Used("a file with flags, in YAML or JSON; flags on the command line come first"),
    ),
    flag("cxl_path", Text, Ignored(CXL_OFF)),
    flag("cxl_size", Number, Ignored(CXL_OFF)),
    flag(
        "default_kv_lease_ttl",
        Time,
        Used("time for which a reader may rely on an object"),
    ),
    flag(
        "default_kv_soft_pin_ttl",
        Time,
        Used("life of a soft pin that names none"),
    ),
    flag("drop_log_memory", Switch, Ignored(LOGGING)),
    flag(
        "dynamic_replication_admission_qps_threshold",
        Fraction,
        Ignored(FANOUT_OFF),
    ),
    flag(
        "dynamic_replication_heat_window_seconds",
        Number,
        Ignored(FANOUT_OFF),
    ),
    flag(
        "dynamic_replication_max_memory_replicas",
        Number,
        Ignored(FANOUT_OFF),
    ),
    flag("dynamic_replication_mode", Text, Only(&["off"], NO_FANOUT)),
    flag("enable_cxl", Switch, Only(OFF, NO_CXL)),
    flag("enable_disk_eviction", Switch, Ignored(DISK_OFF)),
    flag("enable_ha", Switch, Only(OFF, NO_HA)),
    flag(
        "enable_http_metadata_server",
        Switch,
        Used("whether a metadata server for transfer engines runs beside the master"),
    ),
    flag("enable_kv_events", Switch, Only(OFF, NO_EVENTS)),
    flag(
        "enable_metadata_cleanup_on_timeout",
        Switch,
        Ignored(
            "an engine takes its entry away when it ends, and a killed one's is replaced by its successor's",
        ),
    ),
    flag(
        "enable_metric_reporting",
        Switch,
        Ignored(
            "a master logs nothing while nothing is wrong; /metrics and /metrics/summary are always there",
        ),
    ),
    flag(
        "enable_multi_tenants",
        Switch,
        Used(
            "whether tenants have key spaces and quotas of their own; needs tenant_quota_connector_uri",
        ),
    ),
    flag("enable_offload", Switch, Only(OFF, NO_DISK)),
    flag("enable_oplog", Switch, Only(OFF, NO_HA)),
    flag("enable_snapshot", Switch, Only(OFF, NO_SNAPSHOT)),
    flag("enable_snapshot_restore", Switch, Only(OFF, NO_SNAPSHOT)),
    flag("etcd_endpoints", Text, Ignored(HA_OFF)),
    flag(
        "eviction_high_watermark_ratio",
        Fraction,
        Used("used share of the memory above which objects are evicted"),
    ),
    flag(
        "eviction_ratio",
        Fraction,
        Used("share of the memory that a round of eviction frees"),
    ),
    flag("flagfile", Text, Only(EMPTY, IN_FILE)),
    flag("fromenv", Text, Only(EMPTY, IN_FILE)),
    flag("global_file_segment_size", Number, Ignored(DISK_OFF)),
    flag("ha_backend_connstring", Text, Ignored(HA_OFF)),
    flag("ha_backend_type", Text, Ignored(HA_OFF)),
    flag(
        "http_metadata_server_host",
        Text,
        Used("address of the metadata server"),
    ),
    flag(
        "http_metadata_server_port",
        Number,
        Used("port of the metadata server"),
    ),
    flag("kv_events_additional_salt", Text, Ignored(EVENTS_OFF)),
    flag("kv_events_backend_id", Text, Ignored(EVENTS_OFF)),
    flag("kv_events_bind_endpoint", Text, Ignored(EVENTS_OFF)),
    flag("kv_events_block_size", Number, Ignored(EVENTS_OFF)),
    flag("kv_events_dp_rank", Number, Ignored(EVENTS_OFF)),
    flag("kv_events_emit_legacy_compat", Switch, Ignored(EVENTS_OFF)),
    flag("kv_events_emit_object_key", Switch, Ignored(EVENTS_OFF)),
    flag("kv_events_lora_name", Text, Ignored(EVENTS_OFF)),
    flag("kv_events_model_name", Text, Ignored(EVENTS_OFF)),
    flag("kv_events_queue_capacity", Number, Ignored(EVENTS_OFF)),
    flag("kv_events_tenant_id", Text, Ignored(EVENTS_OFF)),
    flag("log_backtrace_at", Text, Ignored(LOGGING)),
    flag("log_dir", Text, Ignored(LOGGING)),
    flag("log_link", Text, Ignored(LOGGING)),
    flag("log_prefix", Switch, Ignored(LOGGING)),
    flag("logbuflevel", Text, Ignored(LOGGING)),
    flag("logbufsecs", Number, Ignored(LOGGING)),
    flag("logemaillevel", Number, Ignored(LOGGING)),
    flag("logfile_mode", Number, Ignored(LOGGING)),
    flag("logmailer", Text, Ignored(LOGGING)),
    flag("logtostderr", Switch, Ignored(LOGGING)),
    flag(
        "max_kv_soft_pin_ttl",
        Time,
        Used("the longest life of a soft pin that a client may ask for"),
    ),
    flag("max_log_size", Number, Ignored(LOGGING)),
    flag("max_retry_attempts", Number, Ignored(TASKS)),
    flag("max_threads", Number, Ignored(THREADS)),
    flag("max_total_finished_tasks", Number, Ignored(TASKS)),
    flag("max_total_pending_tasks", Number, Ignored(TASKS)),
    flag("max_total_processing_tasks", Number, Ignored(TASKS)),
    flag(
        "memory_allocator",
        Text,
        Only(&["offset", "cachelib"], ALLOCATOR),
    ),
    flag(
        "metrics_host",
        Text,
        Used("address of the HTTP port for metrics and administration"),
    ),
    flag(
        "metrics_port",
        Number,
        Used("the HTTP port for metrics and administration"),
    ),
    flag("minloglevel", Number, Ignored(LOGGING)),
    flag(
        "mmap_arena_pool_size",
        Number,
        Ignored("segments belong to the clients that lend them, and are mapped there"),
    ),
    flag(
        "nof_eviction_high_watermark_ratio",
        Fraction,
        Ignored(DISK_OFF),
    ),
    flag("nof_eviction_ratio", Fraction, Ignored(DISK_OFF)),
    flag(
        "nof_heartbeat_failures_threshold",
        Number,
        Ignored(DISK_OFF),
    ),
    flag("nof_heartbeat_interval_sec", Number, Ignored(DISK_OFF)),
    flag("nof_heartbeat_probe_timeout_ms", Number, Ignored(DISK_OFF)),
    flag("offload_cap_ratio", Fraction, Ignored(DISK_OFF)),
    flag("offload_force_evict", Switch, Ignored(DISK_OFF)),
    flag("offload_on_evict", Switch, Only(OFF, NO_DISK)),
    flag("offloading_queue_limit", Number, Ignored(DISK_OFF)),
    flag("oplog_batch_max_entries", Number, Ignored(HA_OFF)),
    flag("oplog_poll_interval_ms", Number, Ignored(HA_OFF)),
    flag("pending_task_timeout_sec", Number, Ignored(TASKS)),
    flag("pod_name", Text, Ignored(HA_OFF)),
    flag("pod_namespace", Text, Ignored(HA_OFF)),
    flag(
        "port",
        Number,
        Used("the former name of rpc_port, which comes first"),
    ),
    flag("processing_task_timeout_sec", Number, Ignored(TASKS)),
    flag("promotion_admission_threshold", Number, Ignored(DISK_OFF)),
    flag("promotion_max_per_heartbeat", Number, Ignored(DISK_OFF)),
    flag("promotion_on_hit", Switch, Only(OFF, NO_DISK)),
    flag("promotion_queue_limit", Number, Ignored(DISK_OFF)),
    flag(
        "put_start_discard_timeout_sec",
        Number,
        Used("seconds after which an unfinished put may be taken over"),
    ),
    flag(
        "put_start_release_timeout_sec",
        Number,
        Used("seconds after which an unfinished put is dropped"),
    ),
    flag("quota_bytes", Number, Ignored(DISK_OFF)),
    flag("root_fs_dir", Text, Only(EMPTY, NO_DISK)),
    flag("rpc_address", Text, Used("address that clients connect to")),
    flag(
        "rpc_conn_timeout_seconds",
        Number,
        Ignored("a connection that does not answer a ping for 5 s is closed"),
    ),
    flag(
        "rpc_enable_tcp_no_delay",
        Switch,
        Ignored("requests are never held back to fill a packet"),
    ),
    flag(
        "rpc_interface",
        Text,
        Only(EMPTY, "write the interface's address in rpc_address"),
    ),
    flag("rpc_port", Number, Used("port that clients connect to")),
    flag("rpc_thread_num", Number, Ignored(THREADS)),
    flag("snapshot_backup_dir", Text, Ignored(SNAPSHOT_OFF)),
    flag(
        "snapshot_catalog_backend_connstring",
        Text,
        Ignored(SNAPSHOT_OFF),
    ),
    flag("snapshot_catalog_backend_type", Text, Ignored(SNAPSHOT_OFF)),
    flag(
        "snapshot_catalog_store_connstring",
        Text,
        Ignored(SNAPSHOT_OFF),
    ),
    flag("snapshot_catalog_store_type", Text, Ignored(SNAPSHOT_OFF)),
    flag(
        "snapshot_child_timeout_seconds",
        Number,
        Ignored(SNAPSHOT_OFF),
    ),
    flag("snapshot_interval_seconds", Number, Ignored(SNAPSHOT_OFF)),
    flag("snapshot_object_store_type", Text, Ignored(SNAPSHOT_OFF)),
    flag("snapshot_payload_backend_type", Text, Ignored(SNAPSHOT_OFF)),
    flag("snapshot_payload_store_type", Text, Ignored(SNAPSHOT_OFF)),
    flag("snapshot_retention_count", Number, Ignored(SNAPSHOT_OFF)),
    flag("stderrthreshold", Number, Ignored(LOGGING)),
    flag("stop_logging_if_full_disk", Switch, Ignored(LOGGING)),
    flag("symbolize_stacktrace", Switch, Ignored(LOGGING)),
    flag("tab_completion_columns", Number, Ignored(COMPLETION)),
    flag("tab_completion_word", Text, Ignored(COMPLETION)),
    flag(
        "tenant_quota_connector_type",
        Text,
        Only(
            &["file"],
            "quotas are read from a file, and changed over HTTP",
        ),
    ),
    flag(
        "tenant_quota_connector_uri",
        Text,
        Used("the file of tenants and quotas, with or without file:// in front"),
    ),
    flag("tryfromenv", Text, Only(EMPTY, IN_FILE)),
    flag("undefok", Text, Only(EMPTY, "leave the unknown flags out")),
    flag("use_mmap_arena_allocator", Switch, Ignored(ALLOCATOR)),
    flag("v", Number, Ignored(LOGGING)),
    flag("vmodule", Text, Ignored(LOGGING)),
];

/// The flag of this name.
pub fn find(name: &str) -> Option<&'static Flag> {
    let index = FLAGS.binary_search_by(|flag| flag.name.cmp(name)).ok()?;
    Some(&FLAGS[index])
}

/// Reads a switch's value.
pub(super) fn switch(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "t" | "true" | "y" | "yes" => Some(true),
        "0" | "f" | "false" | "n" | "no" => Some(false),
        _ => None,
    }
}

impl Flag {
    /// Checks a value as far as the flag alone decides it; an error says what is accepted.
    pub fn check(&self, value: &str) -> Result<(), String> {
        match self.kind {
            Switch if switch(value).is_none() => {
                return Err("true or false is accepted".to_owned());
            }
            Number if value.parse::<u64>().is_err() => {
                return Err("a whole number from 0 is accepted".to_owned());
            }
            Fraction if !value.parse::<f64>().is_ok_and(f64::is_finite) => {
                return Err("a number is accepted".to_owned());
            }
            Time if values::time(value).is_none() => {
                return Err(values::TIME.to_owned());
            }
            _ => {}
        }
        let Only(accepted, instead) = self.effect else {
            return Ok(());
        };
        let given = match switch(value) {
            Some(on) if self.kind == Switch => if on { "true" } else { "false" }.to_owned(),
            _ => value.to_owned(),
        };
        if accepted.contains(&given.as_str()) {
            return Ok(());
        }
        Err(format!("not supported: {instead}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_in_order_so_that_each_is_found() {
        for flag in FLAGS {
            assert_eq!(find(flag.name), Some(flag));
        }
        assert_eq!(find("no_such_flag"), None);
    }

    #[test]
    fn what_is_only_accepted_switched_off_is_refused_switched_on_with_what_to_do() {
        let flag = find("enable_ha").expect("known");
        for off in ["false", "0", "no", "F"] {
            assert_eq!(flag.check(off), Ok(()), "{off}");
        }
        let refusal = flag.check("true").expect_err("refused");
        assert!(refusal.contains("leave it off"), "{refusal}");
        assert!(
            flag.check("maybe")
                .expect_err("no switch")
                .contains("true or false")
        );
    }
}

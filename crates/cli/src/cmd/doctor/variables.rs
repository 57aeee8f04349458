//! Variables of Mooncake's client library, its service and vLLM's connectors.

use std::collections::BTreeMap;

use super::{Finding, Place, Verdict, keys};

/// A variable and how its value is judged.
type Judged = (&'static str, fn(&str) -> Verdict);

/// Names of variables, by what is said of them.
type Listed = (&'static str, &'static [&'static str]);

/// Variables that the drop-in or what runs on it reads, and how each is judged.
const READ: &[Judged] = &[
    ("MC_FORCE_TCP", |text| match keys::switch(text) {
        Some(false) => Verdict::NoEffect("off".to_owned()),
        _ => Verdict::Used("protocol \"rdma\" is taken for \"tcp\"".to_owned()),
    }),
    ("MOONCAKE_CLIENT_HTTP_PORT", |_| {
        Verdict::NoEffect("clients have no HTTP port".to_owned())
    }),
    ("MOONCAKE_CONFIG_PATH", |_| {
        Verdict::Used("the configuration in JSON: give it to --mooncake-config as well".to_owned())
    }),
    ("MOONCAKE_DEVICE", keys::device),
    ("MOONCAKE_ENABLE_CLIENT_HTTP_SERVER", |_| {
        Verdict::Replaced("clients have no HTTP port: see /metrics of the master".to_owned())
    }),
    ("MOONCAKE_GLOBAL_SEGMENT_SIZE", keys::size),
    ("MOONCAKE_LOCAL_BUFFER_SIZE", |_| {
        Verdict::NoEffect("values are not staged".to_owned())
    }),
    ("MOONCAKE_LOCAL_HOSTNAME", |_| {
        Verdict::Used("the address to listen on, and to tell others".to_owned())
    }),
    ("MOONCAKE_MASTER", keys::master),
    ("MOONCAKE_OFFLOAD_ENABLED", keys::offload),
    ("MOONCAKE_PREFERRED_SEGMENT", |_| {
        Verdict::Used("read by vLLM: the node that new objects go to".to_owned())
    }),
    ("MOONCAKE_PROTOCOL", keys::protocol),
    ("MOONCAKE_REQUESTER_LOCAL_HOSTNAME", |_| {
        Verdict::Used("read by vLLM: local_hostname of its workers".to_owned())
    }),
    ("MOONCAKE_TENANT_ID", keys::tenant),
    ("MOONCAKE_TE_META_DATA_SERVER", keys::metadata),
    ("MOONCAKE_DISK_STAGING_BUFFER_BYTES", |_| {
        Verdict::NoEffect("read by vLLM for the tier on disks, which is off".to_owned())
    }),
];

/// Variables that change nothing, by why.
const NO_EFFECT: &[Listed] = &[
    (
        "RDMA is not built in",
        &[
            "MC_AUTO_GID_MAX_RETRIES",
            "MC_EFA_CQ_THREADS",
            "MC_EFA_NIC_SELECTION",
            "MC_ENABLE_DEST_DEVICE_AFFINITY",
            "MC_ENABLE_HCA_PEER_AFFINITY",
            "MC_ENABLE_PARALLEL_REG_MR",
            "MC_ENDPOINT_STORE_TYPE",
            "MC_GID_INDEX",
            "MC_IB_PCI_RELAXED_ORDERING",
            "MC_IB_PORT",
            "MC_IB_SL",
            "MC_IB_TC",
            "MC_LOG_RDMA_SLICE_AFFINITY",
            "MC_MAX_CONCURRENT_REG_MR",
            "MC_MAX_CQE_PER_CTX",
            "MC_MAX_EP_PER_CTX",
            "MC_MAX_INLINE",
            "MC_MAX_MR_SIZE",
            "MC_MAX_SGE",
            "MC_MAX_WR",
            "MC_MIN_REG_SIZE",
            "MC_MLX5_QP_LAG_PORT_BALANCE",
            "MC_MLX5_QP_UDP_SPORTS",
            "MC_MS_AUTO_DISC",
            "MC_MS_FILTERS",
            "MC_MTU",
            "MC_NIC_PEER_AFFINITY",
            "MC_NUM_COMP_CHANNELS_PER_CTX",
            "MC_NUM_CQ_PER_CTX",
            "MC_NUM_QP_PER_EP",
            "MC_PATH_ROUNDROBIN",
            "MC_PKEY_INDEX",
            "MC_RDMA_BIND_ADDRESS",
            "MC_RDMA_NOTIFY_BUFFER_SIZE",
            "MC_RDMA_NOTIFY_CONNECT_TIMEOUT_MS",
            "MC_RDMA_NOTIFY_ENABLED",
            "MC_RDMA_NOTIFY_MAX_PENDING_SENDS",
            "MC_RDMA_NOTIFY_OOB_FALLBACK",
            "MC_RDMA_NOTIFY_RECV_COUNT",
            "MC_RDMA_RAIL_PAUSE_SECONDS",
            "MC_TE_FILTERS",
            "MC_TRACK_RDMA_POSTED_SLICES",
            "MC_USE_RDMA_TWOSIDED",
            "MC_WORKERS_PER_CTX",
            "MC_CUSTOM_TOPO_JSON",
        ],
    ),
    (
        "pieces are cut and gathered by size, and retried by the store",
        &[
            "MC_FRAGMENT_RATIO",
            "MC_RETRY_CNT",
            "MC_SLICE_SIZE",
            "MC_TCP_SLICE_SIZE",
            "MC_STORE_MEMCPY",
        ],
    ),
    (
        "there is one engine",
        &[
            "MC_USE_TENT",
            "MC_USE_TEV1",
            "MC_TENT_CONF",
            "MC_NOF_TRTYPE",
            "MC_FILEREAD_WORKERS",
            "MC_METADATA_CLUSTER_ID",
            "MC_STORE_CLUSTER_ID",
        ],
    ),
    (
        "at an HTTP metadata server, engines leave only where they are",
        &[
            "MC_DISABLE_METACACHE",
            "MC_HANDSHAKE_CONNECT_TIMEOUT",
            "MC_HANDSHAKE_LISTEN_BACKLOG",
            "MC_HANDSHAKE_MAX_LENGTH",
            "MC_HANDSHAKE_PORT",
            "MC_REDIS_DB_INDEX",
            "MC_REDIS_PASSWORD",
            "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS",
        ],
    ),
    (
        "ports are chosen by the system",
        &[
            "MC_LEGACY_RPC_PORT_BINDING",
            "MC_MAX_PRC_PORT",
            "MC_MAX_RPC_PORT",
            "MC_MIN_PRC_PORT",
            "MC_MIN_RPC_PORT",
            "MC_STORE_CLIENT_MAX_PORT",
            "MC_STORE_CLIENT_MIN_PORT",
        ],
    ),
    (
        "the number of threads and connections follows the machine",
        &[
            "MC_RPC_CLIENT_IO_THREADS",
            "MC_STORE_RPC_CLIENT_IO_THREADS",
            "MC_TE_RPC_CLIENT_IO_THREADS",
            "MC_TCP_ENABLE_CONNECTION_POOL",
            "MC_TCP_LANES_PER_PEER",
            "MC_TCP_MAX_CONNECTIONS_PER_PEER",
            "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER",
            "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER",
            "MC_TCP_PROTO",
            "MC_RPC_PROTOCOL",
        ],
    ),
    (
        "values are not staged or cached in the client",
        &[
            "MC_DISABLE_MMAP_ARENA",
            "MC_MMAP_ARENA_POOL_SIZE",
            "MC_STORE_LOCAL_HOT_ADMISSION_THRESHOLD",
            "MC_STORE_LOCAL_HOT_BLOCK_SIZE",
            "MC_STORE_LOCAL_HOT_CACHE_SIZE",
            "MC_STORE_LOCAL_HOT_CACHE_USE_SHM",
            "MC_STORE_PINNED_RESTORE_ARENA_SIZE_BYTES",
            "MC_STORE_PIN_MEMORY_MAX_BYTES",
            "MC_STORE_REPLICA_SCORING",
        ],
    ),
    (
        "the metrics of clients are not logged",
        &[
            "MC_STORE_CLIENT_METRIC",
            "MC_STORE_CLIENT_METRIC_BANDWIDTH",
            "MC_STORE_CLIENT_METRIC_INTERVAL",
            "MC_TE_METRIC",
            "MC_TE_METRIC_INTERVAL_SECONDS",
        ],
    ),
    (
        "read by vLLM's expert parallelism and older connectors, which don't use the store",
        &[
            "MOONCAKE_EP_NUM_LOCAL_RANKS",
            "MOONCAKE_EP_USE_MACA",
            "MOONCAKE_EP_USE_MUSA",
            "MOONCAKE_ABORT_REQUEST_TIMEOUT",
            "MOONCAKE_SENDER_WORKERS",
            "MOONCAKE_SIDE_CHANNEL_PORT",
        ],
    ),
    (
        "both versions of the Internet protocol are used as addresses say",
        &["MC_USE_IPV6"],
    ),
    (
        "snapshots are off",
        &[
            "MOONCAKE_SNAPSHOT_LOCAL_PATH",
            "MOONCAKE_MASTER_SERVICE_SNAPSHOT_TEST_SKIP_CLEANUP",
        ],
    ),
];

/// Variables that something else stands for.
const REPLACED: &[Listed] = &[
    (
        "LAYERCAKE_LOG sets the level; logs go to standard error",
        &["MC_LOG_LEVEL", "MC_LOG_DIR", "MC_YLT_LOG_LEVEL"],
    ),
    (
        "deadlines are fixed in the drop-in: 2 s without progress, 3 s to connect, 30 s for a transfer",
        &[
            "MC_CONN_PAUSE_TTL_MS",
            "MC_RPC_CONNECT_TIMEOUT_MS",
            "MC_RPC_TIMEOUT_MS",
            "MC_SLICE_TIMEOUT",
            "MC_TCP_ADMISSION_TIMEOUT_MS",
            "MC_TCP_PROGRESS_TIMEOUT_SEC",
            "MC_TCP_STATUS_TIMEOUT_SEC",
            "MC_TRANSFER_TIMEOUT",
        ],
    ),
    (
        "LAYERCAKE_SETUP_TIMEOUT: seconds for which setup waits for a master",
        &["MC_STORE_CLIENT_SETUP_RETRIES"],
    ),
    (
        "local_hostname is the address that is listened on",
        &["MC_TCP_BIND_ADDRESS"],
    ),
    (
        "every range has a checksum, which readers check",
        &["MOONCAKE_STORE_CHECKSUM"],
    ),
    (
        "huge_pages of layercake node",
        &["MC_STORE_HUGEPAGE_SIZE", "MC_STORE_USE_HUGEPAGE"],
    ),
];

/// Variables that ask for what there is not, by what to do.
const REFUSED: &[Listed] = &[(
    "transfers of device memory are not built in: unset it",
    &[
        "MC_FORCE_HCA",
        "MC_FORCE_MNNVL",
        "MC_INTRA_NVLINK",
        "MC_CXL_DEV_SIZE",
    ],
)];

/// Families of variables of the tiers on disks and in object storage, which are off.
const DISK: &[&str] = &[
    "MOONCAKE_AWS_",
    "MOONCAKE_BUCKET_",
    "MOONCAKE_DFS_",
    "MOONCAKE_DISK_EVICTION_",
    "MOONCAKE_DISTRIBUTED_",
    "MOONCAKE_ENABLE_DFS",
    "MOONCAKE_NVME_KV_",
    "MOONCAKE_OFFLOAD_",
    "MOONCAKE_OFFSET_",
    "MOONCAKE_SCANMETA_",
    "MOONCAKE_USE_URING",
];

fn listed(table: &'static [Listed]) -> impl Iterator<Item = (&'static str, &'static str)> {
    table
        .iter()
        .flat_map(|(text, names)| names.iter().map(move |name| (*name, *text)))
}

fn find(table: &'static [Listed], name: &str) -> Option<String> {
    let mut listed = listed(table);
    let found = listed.find(|(other, _)| *other == name);
    found.map(|(_, text)| text.to_owned())
}

fn verdict(name: &str, value: &str) -> Verdict {
    if let Some((_, judge)) = READ.iter().find(|(other, _)| *other == name) {
        return judge(value);
    }
    if let Some(text) = find(NO_EFFECT, name) {
        return Verdict::NoEffect(text);
    }
    if let Some(text) = find(REPLACED, name) {
        return Verdict::Replaced(text);
    }
    if let Some(text) = find(REFUSED, name) {
        return match keys::switch(value) {
            Some(false) => Verdict::NoEffect("off".to_owned()),
            _ => Verdict::Refused(text),
        };
    }
    if DISK.iter().any(|family| name.starts_with(family)) {
        return Verdict::NoEffect("it belongs to the tiers on disks, which are off".to_owned());
    }
    Verdict::unknown(name, known().map(|(_, name, _)| name))
}

/// Verdicts on the variables that are set.
pub(super) fn judge(environment: &BTreeMap<String, String>) -> Vec<Finding> {
    let findings = environment.iter().map(|(name, value)| {
        let secret = ["PASSWORD", "SECRET", "ACCESS_KEY"];
        let secret = secret.iter().any(|part| name.contains(part));
        Finding {
            place: Place::Environment,
            name: name.clone(),
            value: Some(if secret {
                "set, not shown".to_owned()
            } else {
                value.clone()
            }),
            verdict: verdict(name, value),
        }
    });
    findings.collect()
}

/// Every variable that is known by its whole name, with the verdict on its commonest value.
pub(super) fn known() -> impl Iterator<Item = (Place, &'static str, Verdict)> {
    let read = READ.iter().map(|(name, judge)| {
        let value = match *name {
            "MC_FORCE_TCP" => "1",
            "MOONCAKE_GLOBAL_SEGMENT_SIZE" => "4GB",
            "MOONCAKE_MASTER" => "127.0.0.1:50051",
            "MOONCAKE_TE_META_DATA_SERVER" => "P2PHANDSHAKE",
            _ => "",
        };
        (Place::Environment, *name, judge(value))
    });
    let of = |verdict: fn(String) -> Verdict| {
        move |(name, text): (&'static str, &'static str)| {
            (Place::Environment, name, verdict(text.to_owned()))
        }
    };
    read.chain(listed(NO_EFFECT).map(of(Verdict::NoEffect)))
        .chain(listed(REPLACED).map(of(Verdict::Replaced)))
        .chain(listed(REFUSED).map(of(Verdict::Refused)))
}

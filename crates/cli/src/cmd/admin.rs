//! What operators ask a running cluster: `ls`, `stat`, `rm`, `segments`, `health`.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::report::{ObjectStat, SegmentStat};
use layercake_store::link::MasterLink;
use serde_json::{Value, json};

use super::{nodes, show};
use crate::config::programs::{Common, ToolSettings};
use crate::config::{Flags, Settings as _, Sources, Value as _};
use crate::connect::{self, Trust};
use crate::output::{self, Table, bytes, thousands};
use crate::{process, security};

/// What every tool takes.
#[derive(Debug, Args)]
pub(crate) struct Tool {
    #[command(flatten)]
    common: Flags<Common>,
    #[command(flatten)]
    settings: Flags<ToolSettings>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// Options of `layercake ls`.
#[derive(Debug, Args)]
pub(crate) struct Ls {
    /// Only keys that begin with this
    #[arg(value_name = "PREFIX", default_value = "")]
    prefix: String,
    /// Show at most this many
    #[arg(long, value_name = "N", default_value_t = 1000)]
    limit: u32,
    /// Show keys behind this one
    #[arg(long, value_name = "KEY")]
    after: Option<String>,
    #[command(flatten)]
    tool: Tool,
}

/// Options of `layercake stat`.
#[derive(Debug, Args)]
pub(crate) struct Stat {
    /// The object's key
    #[arg(value_name = "KEY")]
    key: String,
    #[command(flatten)]
    tool: Tool,
}

/// Options of `layercake rm`.
#[derive(Debug, Args)]
pub(crate) struct Rm {
    /// Keys of the objects to remove
    #[arg(value_name = "KEY")]
    keys: Vec<String>,
    /// Remove all objects whose key this regular expression is found in
    #[arg(long, value_name = "PATTERN")]
    matching: Option<String>,
    /// Remove objects that readers rely on, too
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    tool: Tool,
}

/// Options of `layercake segments` and `layercake health`.
#[derive(Debug, Args)]
pub(crate) struct Plain {
    #[command(flatten)]
    tool: Tool,
}

/// Connects, asks, and leaves again.
fn with_link<T>(
    tool: &Tool,
    sources: &Sources,
    ask: impl AsyncFnOnce(&MasterLink) -> Result<T>,
) -> Result<T> {
    let flags = [&tool.common.given[..], &tool.settings.given].concat();
    let resolved = sources.resolve(&[Common::TABLE, ToolSettings::TABLE], &flags)?;
    let common = Common::take(&resolved)?;
    let settings = ToolSettings::take(&resolved)?;
    process::start_logging(&common)?;
    let trust = Trust {
        token: security::token(&common)?.map(|token| token.shared),
        insecure: common.insecure,
    };
    let name = format!("layercake-{}", std::process::id());
    let mut config = connect::link_config(&settings.master.0, &name, &trust);
    config.tenant = Tenant::new(&settings.tenant).context("setting `tools.tenant`")?;
    let runtime = process::runtime(1)?;
    runtime.block_on(async {
        let link = MasterLink::connect(config).await?;
        let answer = ask(&link).await;
        if let Err(error) = link.close(connect::LEAVE_WITHIN).await {
            tracing::debug!(%error, "the link did not close in order");
        }
        answer
    })
}

fn key(text: &str) -> Result<ObjectKey> {
    ObjectKey::new(text).with_context(|| format!("key \"{}\"", text.escape_debug()))
}

/// `layercake ls`.
pub(crate) fn ls(options: &Ls, sources: &Sources) -> Result<()> {
    let after = options.after.as_deref().map(key).transpose()?;
    if options.limit == 0 {
        bail!("--limit 0 shows nothing: at least 1 is needed");
    }
    let page = with_link(&options.tool, sources, async |link| {
        Ok(link
            .list(&options.prefix, options.limit, after.as_ref())
            .await?)
    })?;
    if options.tool.json {
        let objects: Vec<Value> = page.objects.iter().map(show::object).collect();
        return output::print_json(&json!({"objects": objects, "more": page.more}));
    }
    if page.objects.is_empty() {
        eprintln!("{}", nothing_listed(options));
        return Ok(());
    }
    let mut table = Table::new(&[
        "key", "size", "state", "replicas", "lease", "pins", "readers",
    ])
    .right(1)
    .right(3)
    .right(4)
    .right(6);
    for object in &page.objects {
        table.row(row(object));
    }
    output::print(table.to_string().trim_end())?;
    if let (true, Some(last)) = (page.more, page.objects.last()) {
        eprintln!("there are more: go on with --after '{}'", last.key);
    }
    Ok(())
}

/// What an empty listing means.
fn nothing_listed(options: &Ls) -> String {
    let whose = "the tenant has none, or --tenant names another";
    match (options.prefix.as_str(), &options.after) {
        ("", None) => format!("no objects: {whose}"),
        (prefix, None) => format!("no objects whose key begins with '{prefix}'"),
        (_, Some(after)) => format!("no objects behind '{after}'"),
    }
}

fn row(object: &ObjectStat) -> [String; 7] {
    [
        object.key.to_string(),
        bytes(object.size),
        show::object_state(object.state).to_owned(),
        object.replicas.len().to_string(),
        show::lease(object.lease_remaining),
        show::pins(object),
        object.open_readers.to_string(),
    ]
}

/// `layercake stat`.
pub(crate) fn stat(options: &Stat, sources: &Sources) -> Result<()> {
    let key = key(&options.key)?;
    let detail = with_link(&options.tool, sources, async |link| {
        link.stat(&key)
            .await
            .with_context(|| format!("key \"{key}\""))
    })?;
    let names: BTreeMap<_, _> = detail
        .segments
        .iter()
        .map(|segment| (segment.id, segment.name.as_str()))
        .collect();
    let name = |id| names.get(&id).copied().unwrap_or("unknown");
    let object = &detail.object;
    if options.tool.json {
        let mut value = show::object(object);
        value["replicas"] = object
            .replicas
            .iter()
            .map(|replica| {
                json!({
                    "segment": replica.segment.to_string(),
                    "node": name(replica.segment),
                    "offset": replica.offset,
                    "header_bytes": replica.header_len,
                    "generation": replica.generation.0,
                })
            })
            .collect();
        return output::print_json(&value);
    }
    let mut table = Table::new(&["", ""]);
    let mut line = |name: &str, value: String| table.row([name.to_owned(), value]);
    line("key", object.key.to_string());
    line(
        "size",
        format!("{} ({} bytes)", bytes(object.size), thousands(object.size)),
    );
    line("state", show::object_state(object.state).to_owned());
    line("generation", object.generation.to_string());
    line("lease", show::lease(object.lease_remaining));
    line("open readers", object.open_readers.to_string());
    line("pins", show::pins(object));
    line(
        "group",
        object.group.clone().unwrap_or_else(|| "-".to_owned()),
    );
    line(
        "last touched",
        format!(
            "epoch {}, index {} of its prefix",
            object.epoch, object.prefix_index
        ),
    );
    for replica in &object.replicas {
        line(
            "replica",
            format!(
                "segment {} of {}, offset {}",
                replica.segment,
                name(replica.segment),
                replica.offset
            ),
        );
    }
    output::print(table.to_string().trim_end())
}

/// `layercake rm`.
pub(crate) fn rm(options: &Rm, sources: &Sources) -> Result<()> {
    let keys: Vec<ObjectKey> = options
        .keys
        .iter()
        .map(|text| key(text))
        .collect::<Result<_>>()?;
    match (&options.matching, keys.is_empty()) {
        (None, true) => bail!("nothing to remove: name keys, or give --matching PATTERN"),
        (Some(_), false) => bail!("--matching contradicts the keys that are named"),
        _ => {}
    }
    let (removed, refused) = with_link(&options.tool, sources, async |link| {
        if let Some(pattern) = &options.matching {
            let removed = link.remove_matching(pattern, options.force).await?;
            return Ok((removed, Vec::new()));
        }
        let results = link.remove(&keys, options.force).await?;
        let mut removed = 0;
        let mut refused = Vec::new();
        for (key, result) in keys.iter().zip(results) {
            match result {
                Ok(()) => removed += 1,
                Err(refusal) => refused.push((key.to_string(), refusal.to_string())),
            }
        }
        Ok((removed, refused))
    })?;
    if options.tool.json {
        let refused: Vec<Value> = refused
            .iter()
            .map(|(key, reason)| json!({"key": key, "reason": reason}))
            .collect();
        output::print_json(&json!({"removed": removed, "refused": refused}))?;
    } else if removed > 0 || refused.is_empty() {
        output::print(format!(
            "removed {removed} {}",
            show::plural(removed, "object")
        ))?;
    }
    match &refused[..] {
        [] => Ok(()),
        [(key, reason)] => bail!("\"{key}\" was not removed: {reason}"),
        [(key, reason), ..] => {
            bail!(
                "{} objects were not removed, first \"{key}\": {reason}",
                refused.len()
            )
        }
    }
}

/// `layercake segments`.
pub(crate) fn segments(options: &Plain, sources: &Sources) -> Result<()> {
    let segments = with_link(&options.tool, sources, async |link| {
        Ok(link.segments().await?)
    })?;
    if options.tool.json {
        let segments: Vec<Value> = segments.iter().map(show::segment).collect();
        return output::print_json(&json!({"segments": segments}));
    }
    if segments.is_empty() {
        eprintln!(
            "no segments: no node has mounted memory; `layercake node` lends some, and mounts it when it has touched all of it"
        );
        return Ok(());
    }
    let mut table = Table::new(&[
        "node",
        "segment",
        "address",
        "state",
        "size",
        "used",
        "largest free",
        "held back",
        "objects",
        "heard of",
    ]);
    for column in 4..10 {
        table = table.right(column);
    }
    for stat in &segments {
        table.row(segment_row(stat));
    }
    output::print(table.to_string().trim_end())
}

fn segment_row(stat: &SegmentStat) -> [String; 10] {
    let segment = &stat.segment;
    let share = stat.used_bytes as f64 / segment.len.max(1) as f64 * 100.0;
    [
        segment.name.clone(),
        segment.id.to_string(),
        segment.endpoint.tcp.clone(),
        show::segment_state(stat.state).to_owned(),
        bytes(segment.len),
        format!("{} ({share:.0} %)", bytes(stat.used_bytes)),
        bytes(stat.largest_free),
        bytes(stat.quarantined_bytes),
        thousands(stat.objects),
        format!("{:.1} s ago", stat.heartbeat_age.as_secs_f64()),
    ]
}

/// `layercake health`: fails when the cluster can't take or serve an object.
pub(crate) fn health(options: &Plain, sources: &Sources) -> Result<()> {
    let (status, segments) = with_link(&options.tool, sources, async |link| {
        Ok((link.status().await?, link.segments().await?))
    })?;
    let late_after = nodes::late_after(status.client_ttl);
    let late = nodes::late(&segments, late_after);
    let heard_of = |stat: &SegmentStat| stat.heartbeat_age <= late_after;
    let ok = status.segments > 0 && segments.iter().any(heard_of);
    if options.tool.json {
        let mut value = show::status(&status);
        value["healthy"] = ok.into();
        value["late_nodes"] = json!(late);
        output::print_json(&value)?;
    } else {
        let mut table = Table::new(&["", ""]);
        let mut line = |name: &str, value: String| table.row([name.to_owned(), value]);
        line(
            "master",
            format!("term {}, up {}", status.term, status.uptime.show_seconds()),
        );
        line("members", thousands(status.members));
        line("segments", thousands(status.segments));
        if !late.is_empty() {
            line("not heard of lately", Vec::from_iter(late).join(", "));
        }
        line(
            "memory",
            format!(
                "{} of {} used",
                bytes(status.used_bytes),
                bytes(status.capacity_bytes)
            ),
        );
        line("held back", bytes(status.quarantined_bytes));
        line("objects", thousands(status.objects));
        line("open puts", thousands(status.reserved_objects));
        line("evicted", thousands(status.evicted_objects));
        line("refused for want of room", thousands(status.refused_puts));
        line("nodes lost", thousands(status.lost_nodes));
        output::print(table.to_string().trim_end())?;
    }
    if status.segments == 0 {
        bail!("no node has mounted memory: nothing can be stored");
    }
    if !ok {
        bail!("no node was heard of in the last {}", late_after.show());
    }
    Ok(())
}

trait ShowSeconds {
    fn show_seconds(&self) -> String;
}

impl ShowSeconds for Duration {
    fn show_seconds(&self) -> String {
        Self::from_secs(self.as_secs()).show()
    }
}

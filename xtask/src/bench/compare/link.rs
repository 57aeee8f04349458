//! A slower link than loopback: every measurement in a network of its own, whose loopback the kernel holds back.
//!
//! That needs a kernel which lets this user make user and network namespaces, and has the queueing disciplines: `tbf`
//! for a limited rate alone, `netem` for delay and loss. Both directions go through the same discipline: what is
//! said of a packet holds for requests and answers alike.

use std::process::Command;

use anyhow::{Context as _, Result, bail};
use clap::Args;

#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Link {
    /// All processes talk over a link of this rate, as `tc` writes it: 1gbit
    #[arg(long = "link-rate", value_name = "RATE", requires = "compare")]
    rate: Option<String>,
    /// Packets take so long each way: 1ms
    #[arg(long = "link-delay", value_name = "TIME", requires = "compare")]
    delay: Option<String>,
    /// So many packets are lost: 0.1%
    #[arg(long = "link-loss", value_name = "SHARE", requires = "compare")]
    loss: Option<String>,
}

impl Link {
    pub(crate) fn is_emulated(&self) -> bool {
        self.rate.is_some() || self.delay.is_some() || self.loss.is_some()
    }

    /// As it is told among the conditions.
    pub(crate) fn describe(&self) -> String {
        let parts = [
            ("rate", &self.rate),
            ("delay", &self.delay),
            ("loss", &self.loss),
        ];
        let parts = parts
            .into_iter()
            .filter_map(|(name, value)| Some(format!("{name} {}", value.as_ref()?)));
        parts.collect::<Vec<_>>().join(", ")
    }

    /// The discipline, as `tc` is told it.
    fn discipline(&self) -> String {
        if let (Some(rate), None, None) = (&self.rate, &self.delay, &self.loss) {
            // The bucket holds some of the largest packets that loopback has.
            return format!("tbf rate {rate} burst 512kb latency 20ms");
        }
        let parts = [
            ("delay", &self.delay),
            ("loss", &self.loss),
            ("rate", &self.rate),
        ];
        // Enough room for what is under way on a fast, long link.
        let start = "netem limit 20000".to_owned();
        parts.into_iter().fold(start, |text, (name, value)| {
            value
                .as_ref()
                .map_or(text.clone(), |value| format!("{text} {name} {value}"))
        })
    }

    /// The command in a network of its own.
    pub(crate) fn around(&self, command: &Command) -> Command {
        let mut outer = Command::new("unshare");
        outer
            .args(["--map-root-user", "--net", "sh", "-e", "-c"])
            .arg(format!(
                "ip link set lo up; tc qdisc add dev lo root {}; exec \"$@\"",
                self.discipline()
            ))
            .arg("sh")
            .arg(command.get_program())
            .args(command.get_args());
        let set = command.get_envs();
        outer.envs(set.filter_map(|(name, value)| Some((name, value?))));
        outer
    }

    /// That there can be such a link here.
    pub(crate) fn check(&self) -> Result<()> {
        let output = self
            .around(&Command::new("true"))
            .env("LC_ALL", "C")
            .output()
            .context("start unshare (package util-linux)")?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let discipline = self.discipline();
        let kind = discipline.split(' ').next().unwrap_or_default();
        bail!(
            "a link of {} can't be emulated here: {}\nIt takes a kernel that lets this user make user and network namespaces and has the \
             queueing discipline `{kind}`, and the program `tc` (package iproute2)",
            self.describe(),
            said.trim()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_alone_takes_a_bucket_and_anything_else_the_emulator() {
        let mut link = Link {
            rate: Some("1gbit".to_owned()),
            ..Link::default()
        };
        assert!(link.discipline().starts_with("tbf rate 1gbit "));
        link.loss = Some("0.1%".to_owned());
        assert_eq!(link.discipline(), "netem limit 20000 loss 0.1% rate 1gbit");
        assert_eq!(link.describe(), "rate 1gbit, loss 0.1%");
    }
}

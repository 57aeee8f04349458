//! `layercake replay`
mod histogram;
mod messages;
mod pattern;
mod plan;
mod plot;
mod report;
mod trace;
mod workload;

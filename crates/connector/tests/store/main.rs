//! The connector on a real store: a master, a node and clients in this process.

mod cluster;
mod damaged;
mod early;
mod ends;
mod late;
mod order;
mod placement;
mod quiet;
mod random;
mod restored;
mod rig;
mod scheduler;
mod sharing;
mod whole;
mod worker;

//! The engine on a real master and node: what it loads equals what it would have computed, to the bit.

mod cluster;
mod damage;
mod early;
mod equal;
mod faults;
mod late;
mod link;
mod meddler;
mod network;
mod random;
mod ranks;
mod rig;
mod sharing;

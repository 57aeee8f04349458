//! Shared memory
mod cma;
mod greeting;
mod raw;
mod slots;
mod socket;
mod table;
mod wire;

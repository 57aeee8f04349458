//! Modules that need no interpreter, with their tests: the library itself can only be loaded by one.

#[path = "../src/core/table.rs"]
mod table;

#[path = "../src/core/turns.rs"]
mod turns;

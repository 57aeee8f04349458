//! Behaviour of the pure parts: keys, ranges, layouts, headers and codes, mostly as properties
//! against a naive model.

mod code;
mod early;
mod fingerprint;
mod header;
mod header_properties;
mod key;
mod layout;
mod range;
mod template;
mod verify;
mod written;

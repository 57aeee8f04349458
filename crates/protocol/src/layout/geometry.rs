//! Layouts as they are written on a command line.
//!
//! Two forms: a number of equal layers with the byte lengths of their entries, `8` and `1024,1024`;
//! or a list of layers, `0-7:1024,1024;8:512,2048`, where each layer from 0 on is named exactly once.
//! Entries are numbered in the order given.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use thiserror::Error;

use super::{EntrySpec, LayerSpec, LayoutError, MAX_ENTRIES, MAX_LAYERS, ObjectLayout};

/// The layers of a model by the lengths of their cache entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelGeometry {
    // One element per layer, from physical layer 0 on.
    layers: Vec<Vec<u64>>,
    layout: ObjectLayout,
}

/// Why a text describes no geometry.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GeometryError {
    /// A length is no number, or too large for one.
    #[error("{text:?} in {piece:?} is no number of bytes")]
    Number {
        /// The text in the place of the number.
        text: String,
        /// The piece it stands in.
        piece: String,
    },
    /// A length is 0.
    #[error("{piece:?} has an entry of 0 bytes: at least 1 is needed")]
    Zero {
        /// The piece it stands in.
        piece: String,
    },
    /// A piece lacks its colon.
    #[error("{piece:?} is not of the form LAYERS:BYTES,BYTES…")]
    Form {
        /// The piece.
        piece: String,
    },
    /// The part before the colon names no layers.
    #[error(
        "{text:?} in {piece:?} is neither a layer nor FIRST-LAST with FIRST up to LAST, below {MAX_LAYERS}"
    )]
    Layers {
        /// The text in the place of the layers.
        text: String,
        /// The piece it stands in.
        piece: String,
    },
    /// A layer is named by two pieces.
    #[error("{piece:?} names layer {layer}, which {earlier:?} has named already")]
    Overlap {
        /// The piece.
        piece: String,
        /// The layer.
        layer: u32,
        /// The piece that named it first.
        earlier: String,
    },
    /// A layer below the last one is not named.
    #[error("layer {layer} is missing: layers up to {last} are given")]
    Gap {
        /// The layer.
        layer: u32,
        /// The last layer named.
        last: u32,
    },
    /// The layers make no layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

impl ModelGeometry {
    /// `layers` layers, each with entries of these lengths.
    pub fn uniform(layers: NonZeroU32, entry_bytes: &[u64]) -> Result<Self, GeometryError> {
        let count = layers.get() as usize;
        if count > MAX_LAYERS {
            return Err(LayoutError::TooManyLayers { count }.into());
        }
        Self::uneven(vec![entry_bytes.to_vec(); count])
    }

    /// Layers with entries of their own lengths, from physical layer 0 on.
    pub fn uneven(layers: Vec<Vec<u64>>) -> Result<Self, GeometryError> {
        let specs = layers.iter().zip(0..).map(|(entries, physical)| LayerSpec {
            physical,
            entries: entries.iter().enumerate().map(entry).collect(),
        });
        let layout = ObjectLayout::new(specs)?;
        Ok(Self { layers, layout })
    }

    /// Reads the list of lengths that goes with a number of equal layers: `1024,1024`.
    pub fn parse_entry_bytes(text: &str) -> Result<Vec<u64>, GeometryError> {
        lengths(text, text)
    }

    /// Reads the form with equal layers: the values of `--layers` and `--entry-bytes`.
    pub fn parse_uniform(layers: NonZeroU32, entry_bytes: &str) -> Result<Self, GeometryError> {
        Self::uniform(layers, &Self::parse_entry_bytes(entry_bytes)?)
    }

    /// Reads the form with uneven layers: `0-7:1024,1024;8:512,2048`.
    pub fn parse_layer_entries(text: &str) -> Result<Self, GeometryError> {
        let mut given: Vec<Option<(&str, Vec<u64>)>> = Vec::new();
        for piece in text.split(';').map(str::trim) {
            let Some((layers, bytes)) = piece.split_once(':') else {
                return Err(GeometryError::Form {
                    piece: piece.to_owned(),
                });
            };
            let (first, last) = layer_bounds(layers.trim(), piece)?;
            let lengths = lengths(bytes, piece)?;
            if given.len() <= last {
                given.resize(last + 1, None);
            }
            for (layer, place) in (0..).zip(&mut given).skip(first).take(last + 1 - first) {
                if let Some((earlier, _)) = place {
                    return Err(GeometryError::Overlap {
                        piece: piece.to_owned(),
                        layer,
                        earlier: (*earlier).to_owned(),
                    });
                }
                *place = Some((piece, lengths.clone()));
            }
        }
        let mut layers = Vec::with_capacity(given.len());
        let last = (1..)
            .zip(&given)
            .last()
            .map_or(0, |(count, _): (u32, _)| count - 1);
        for (layer, place) in (0..).zip(given) {
            let Some((_, lengths)) = place else {
                return Err(GeometryError::Gap { layer, last });
            };
            layers.push(lengths);
        }
        Self::uneven(layers)
    }

    /// The layout of an object of all layers.
    pub fn layout(&self) -> &ObjectLayout {
        &self.layout
    }

    /// The lengths of each layer's entries.
    pub fn layers(&self) -> &[Vec<u64>] {
        &self.layers
    }
}

impl FromStr for ModelGeometry {
    type Err = GeometryError;

    fn from_str(text: &str) -> Result<Self, GeometryError> {
        Self::parse_layer_entries(text)
    }
}

/// The form with uneven layers, equal neighbours together.
impl fmt::Display for ModelGeometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut first = 0;
        for run in self.layers.chunk_by(|a, b| a == b) {
            if first > 0 {
                f.write_str(";")?;
            }
            let last = first + run.len() - 1;
            if first == last {
                write!(f, "{first}:")?;
            } else {
                write!(f, "{first}-{last}:")?;
            }
            for (index, len) in run[0].iter().enumerate() {
                write!(f, "{}{len}", if index == 0 { "" } else { "," })?;
            }
            first = last + 1;
        }
        Ok(())
    }
}

/// Entries are ordered by name: enough digits that this is the order given.
fn entry((index, &len): (usize, &u64)) -> EntrySpec {
    const { assert!(MAX_ENTRIES <= 10_000, "four digits number all entries") };
    EntrySpec {
        name: format!("entry{index:04}"),
        len,
    }
}

fn lengths(text: &str, piece: &str) -> Result<Vec<u64>, GeometryError> {
    let number = |text: &str| match digits(text.trim()) {
        Some(0) => Err(GeometryError::Zero {
            piece: piece.to_owned(),
        }),
        Some(len) => Ok(len),
        None => Err(GeometryError::Number {
            text: text.trim().to_owned(),
            piece: piece.to_owned(),
        }),
    };
    text.split(',').map(number).collect()
}

/// First and last layer of `7` or `0-7`.
fn layer_bounds(text: &str, piece: &str) -> Result<(usize, usize), GeometryError> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let layer = |text: &str| {
        let layer = usize::try_from(digits(text.trim())?).ok()?;
        (layer < MAX_LAYERS).then_some(layer)
    };
    match (layer(first), layer(last)) {
        (Some(first), Some(last)) if first <= last => Ok((first, last)),
        _ => Err(GeometryError::Layers {
            text: text.to_owned(),
            piece: piece.to_owned(),
        }),
    }
}

/// A number of digits alone: no sign, as `str::parse` would take.
fn digits(text: &str) -> Option<u64> {
    text.bytes()
        .all(|b| b.is_ascii_digit())
        .then(|| text.parse().ok())?
}

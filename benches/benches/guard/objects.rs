//! Headers of 64 rows of 64 KiB, and the places of a layer's pieces for 64 blocks.

use std::num::NonZeroU64;

use anyhow::{Result, ensure};
use bytes::Bytes;
use layercake_benches::keys::key;
use layercake_protocol::fingerprint::Fingerprint;
use layercake_protocol::header::{
    Checksums, Expected, HeaderState, HeaderView, ObjectHeader, ReadPlan, Row, Rows, WrittenRanges,
};
use layercake_protocol::ids::{Epoch, Generation};
use layercake_protocol::key::Tenant;
use layercake_protocol::layout::{
    AppliedRanges, BoundTemplate, EntryBuffer, LayerSpec, ObjectLayout, RangeTemplate,
    TemplateError,
};
use layercake_protocol::range::ByteRange;

use crate::{Path, count};

pub(crate) const PATHS: &[Path] = &[
    ("header: 64 rows, encoded", encode),
    ("header: 64 rows, decoded", decode),
    ("header: 64 rows, checked where they lie", check),
    ("header: 64 rows, noted as written", note),
    ("header: 64 pieces, planned and verified", verify),
    ("layout: a layer's template, made and bound", bind),
    ("layout: a layer's template, applied to 64 blocks", apply),
];

const ROWS: u32 = 64;
const PAGE: u64 = 64 << 10;

fn range(row: u32) -> Result<ByteRange> {
    Ok(ByteRange::new(u64::from(row) * PAGE, PAGE)?)
}

fn rows() -> Result<Vec<Row>> {
    let rows = (0..ROWS).map(|row| {
        Ok(Row {
            range: range(row)?,
            crc32c: Some(row.wrapping_mul(0x9E37_79B9)),
        })
    });
    rows.collect()
}

fn header() -> Result<ObjectHeader> {
    Ok(ObjectHeader {
        state: HeaderState::Sealed,
        generation: Generation(7),
        tenant: Tenant::default(),
        key: key(1)?,
        group: None,
        payload_len: u64::from(ROWS) * PAGE,
        fingerprint: Some(Fingerprint([3; 16])),
        layout_id: 5,
        epoch: Epoch(11),
        prefix_index: 4,
        checksums: Checksums::Crc32c,
        rows: rows()?,
    })
}

fn encode() -> Result<()> {
    let header = header()?;
    let mut place = vec![0; header.spec().encoded_len()? as usize];
    count(|| header.encode_into(&mut place))??;
    ensure!(ObjectHeader::decode(&place)? == header, "it changed");
    Ok(())
}

fn decode() -> Result<()> {
    let header = header()?;
    let bytes = header.encode()?;
    let decoded = count(|| ObjectHeader::decode(&bytes))??;
    ensure!(decoded == header, "it changed");
    Ok(())
}

fn check() -> Result<()> {
    let header = header()?;
    let bytes = Bytes::from(header.encode()?);
    let expected = Expected {
        tenant: &header.tenant,
        key: &header.key,
        generation: header.generation,
        payload_len: header.payload_len,
        fingerprint: header.fingerprint,
    };
    let rows = count(|| -> Result<Rows> {
        let view = HeaderView::parse(&bytes)?;
        view.check(&expected)?;
        view.check_sealed()?;
        Ok(view.into_rows(&bytes))
    })??;
    ensure!(rows.iter().eq(header.rows), "the rows changed");
    Ok(())
}

fn note() -> Result<()> {
    let rows = rows()?;
    let written = count(|| {
        let mut written = WrittenRanges::new(rows.len());
        for row in &rows {
            written.record(row.range, row.crc32c);
        }
        written
    })?;
    ensure!(written.is_complete(u64::from(ROWS) * PAGE), "a gap");
    Ok(())
}

fn verify() -> Result<()> {
    let header = header()?;
    let bytes = Bytes::from(header.encode()?);
    let rows = HeaderView::parse(&bytes)?.into_rows(&bytes);
    let wanted = (0..ROWS).map(range).collect::<Result<Vec<_>>>()?;
    let crcs: Vec<_> = rows.iter().map(|row| row.crc32c).collect();
    let verified = count(|| ReadPlan::new(&rows, &wanted).verify(&crcs))??;
    ensure!(verified.unverified_bytes == 0, "a row was not compared");
    Ok(())
}

const BLOCKS: u64 = 4096;
const UNIT: NonZeroU64 = NonZeroU64::new(PAGE / 4).expect("above 0");
const ENTRIES: [(&str, u64); 2] = [("k", PAGE), ("v", PAGE)];

fn layout() -> Result<ObjectLayout> {
    let layers = (0..32).map(|physical| LayerSpec::new(physical, ENTRIES));
    Ok(ObjectLayout::new(layers)?)
}

/// A layer's pieces of 16 KiB, where the caches of its two entries follow each other.
fn template(layout: &ObjectLayout) -> Result<BoundTemplate, TemplateError> {
    let buffers = [0, BLOCKS * PAGE].map(|base| EntryBuffer { base, stride: PAGE });
    RangeTemplate::new(layout, 17, UNIT)?.bind(&buffers, BLOCKS)
}

fn bind() -> Result<()> {
    let layout = layout()?;
    let bound = count(|| template(&layout))??;
    ensure!(bound.len() == 8, "two entries of four pieces");
    Ok(())
}

fn apply() -> Result<()> {
    let bound = template(&layout()?)?;
    let blocks: Vec<u64> = (0..64).map(|block| block * 61 % BLOCKS).collect();
    let mut ranges = AppliedRanges::default();
    count(|| bound.apply(&blocks, &mut ranges))??;
    ensure!(ranges.addresses().len() == 64 * 8, "a piece is missing");
    Ok(())
}

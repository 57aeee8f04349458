//! Transfers inside one engine: copies between its own regions, on the copy threads, small batches on the
//! thread that submits them.
//!
//! The rules are those of every transport: region, capability, access, bounds and generation are
//! checked for each piece, and refusals counted, though owner and caller are one.

use std::sync::Arc;
use std::time::Instant;

use layercake_protocol::ids::{Capability, RegionId};
use smallvec::SmallVec;

use crate::backend::{Backend, Context};
use crate::batch::{Direction, Piece, RemoteSlice};
use crate::config::TransportKind;
use crate::copy_pool::{CopyPool, Moved, Part, PartMover, PieceRun, Results};
use crate::error::{PieceError, Refusal};
use crate::job::{Job, PieceSet};
use crate::mapped::{Few, MappedCopy, MappedPart, TOGETHER};
use crate::memory::{RegionEntry, Registry, Served};

#[derive(Debug)]
pub(crate) struct LocalBackend {
    context: Arc<Context>,
    pool: Arc<CopyPool>,
}

impl LocalBackend {
    pub(crate) fn new(context: Arc<Context>, pool: Arc<CopyPool>) -> Self {
        Self { context, pool }
    }
}

impl Backend for LocalBackend {
    fn kind(&self) -> TransportKind {
        TransportKind::Local
    }

    fn submit(&self, job: Arc<Job>, pieces: PieceSet) {
        let mover = LocalMover {
            context: Arc::clone(&self.context),
        };
        PieceRun::start(job, pieces, mover, &self.pool);
    }

    /// The engine stops the copy threads, which other transports use as well.
    fn shutdown(&self, _deadline: Instant) {}
}

struct LocalMover {
    context: Arc<Context>,
}

/// The regions of a unit: nearly always one.
#[derive(Default)]
struct Regions(SmallVec<[(RegionId, Capability, Served); 1]>);

impl Regions {
    fn open(&mut self, registry: &Registry, remote: &RemoteSlice) -> Result<usize, Refusal> {
        let same = |(region, capability, _): &(RegionId, Capability, Served)| {
            *region == remote.region && *capability == remote.capability
        };
        // Neighbouring parts mostly lie in the same one.
        if let Some(known) = self.0.iter().rposition(same) {
            return Ok(known);
        }
        let served = registry.open(remote.region, &remote.capability)?;
        self.0.push((remote.region, remote.capability, served));
        Ok(self.0.len() - 1)
    }

    fn entry(&self, at: usize) -> &RegionEntry {
        self.0[at].2.entry()
    }
}

impl LocalMover {
    /// Validates a part, in a region that was opened.
    fn locate<'a>(
        &self,
        job: &'a Job,
        part: &Part,
        entry: &'a RegionEntry,
    ) -> Result<MappedPart<'a>, Refusal> {
        let Piece { local, remote } = &job.pieces()[part.piece];
        entry.check_op(job.direction(), remote.offset, remote.len)?;
        let offset = remote.offset + part.offset;
        let checks = self.context.config.generation_checks;
        let tags = match remote.generation.filter(|_| checks) {
            Some(generation) => Some((entry.tags_of(offset, part.len)?, generation)),
            None => None,
        };
        let size = |n: u64| usize::try_from(n).expect("a range inside mapped memory fits");
        let (start, len) = (size(part.offset), size(part.len));
        let (target, source) = match job.direction() {
            Direction::Read => (local.target().part(start, len), entry.source(offset, len)),
            Direction::Write => (entry.target(offset, len), local.source().part(start, len)),
        };
        let (Some(target), Some(source)) = (target, source) else {
            return Err(Refusal::OutOfBounds);
        };
        Ok(MappedPart::new(target, source, tags))
    }

    /// Moves a few parts and adds a result for each.
    fn move_few(&self, job: &Job, parts: &[Part], regions: &mut Regions, moved: &mut Results) {
        let remote = |part: &Part| &job.pieces()[part.piece].remote;
        let opened: Few<_> = parts
            .iter()
            .map(|part| regions.open(&self.context.registry, remote(part)))
            .collect();
        let mut located = Few::new();
        let refused: Few<_> = parts
            .iter()
            .zip(&opened)
            .map(|(part, region)| {
                located.push(self.locate(job, part, regions.entry((*region)?))?);
                Ok(())
            })
            .collect();
        let copied = MappedCopy::of(job).run(&located);
        let mut copied = copied.iter();
        for (part, refused) in parts.iter().zip(&refused) {
            let result = refused.and_then(|()| *copied.next().expect("one result for each"));
            moved.push(match result {
                Ok(crc) => Moved::Done(crc),
                Err(refusal) => {
                    if refusal.is_security() && part.offset == 0 {
                        self.context.stats.add_security_refusal();
                    }
                    Moved::Failed(PieceError::Refused(refusal))
                }
            });
        }
    }
}

impl PartMover for LocalMover {
    fn move_unit(&self, job: &Job, parts: &[Part], moved: &mut Results) {
        let mut regions = Regions::default();
        for parts in parts.chunks(TOGETHER) {
            self.move_few(job, parts, &mut regions, moved);
        }
    }

    fn is_mere_copy(&self, _job: &Job, _parts: &[Part]) -> bool {
        true
    }

    fn conclude(&self, _job: &Job) -> Result<(), PieceError> {
        Ok(())
    }

    fn hand_back(&self, job: Arc<Job>, pieces: PieceSet) {
        self.context.fall_back(job, pieces, TransportKind::Local);
    }
}

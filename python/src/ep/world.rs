//! [`World`]: the ranks of a host, and the memory that they share.

use std::path::PathBuf;
use std::sync::Arc;

use moontide_ep::Shape;
use moontide_heap::{HugePages, Liveness, Rank, RankSet, WorldConfig, WorldShape};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::step::{Refused, wait_in_slices};
use crate::arguments::seconds;
use crate::errors;
use crate::process::{OfProcess, gone};

/// Ranks as Python has them.
pub(super) fn ranks_tuple(py: Python<'_>, ranks: RankSet) -> PyResult<Bound<'_, PyTuple>> {
    PyTuple::new(py, ranks.iter().map(|rank| rank.0).collect::<Vec<_>>())
}

/// Ranks as Python gives them.
pub(super) fn rank_set(ranks: &[u32], of: u32) -> PyResult<RankSet> {
    match ranks.iter().find(|&&rank| rank >= of) {
        Some(rank) => Err(errors::argument(format!("there is no rank {rank}; there are {of}, from 0"))),
        None => Ok(ranks.iter().map(|&rank| Rank(rank)).collect()),
    }
}

/// The processes of one host that exchange tokens, each a rank, and memory that all of them map. Joining waits for all.
///
/// - ``path``: the world's name: a socket of rank 0. Processes of the same user can join.
/// - ``rank`` of ``ranks``; the latter and ``bytes`` are the same for all.
/// - ``bytes``: memory of each rank: the sum of ``Channel.bytes`` of all channels that it is for.
///
/// A process that joins in place of a rank that died waits for nobody. When rank 0 dies the others go on, and nobody can
/// join any more. Ranks write into each other's memory: run only programs that may do that.
///
/// >>> import os, tempfile
/// >>> from moontide.ep import World
/// >>> with World(os.path.join(tempfile.mkdtemp(), "ep"), rank=0, ranks=1, bytes=1 << 20) as world:
/// ...     world.barrier(), world.generation, world.liveness(0)
/// ((0,), 1, 'alive')
#[pyclass(module = "moontide.ep", frozen)]
#[derive(Debug)]
pub(crate) struct World {
    inside: OfProcess<Inside>,
    rank: u32,
    shape: WorldShape,
}

#[derive(Clone, Debug)]
struct Inside {
    world: Arc<moontide_heap::World>,
    /// Up to where channels take the regions, and where they are.
    taken: Arc<Mutex<Vec<(u64, u64)>>>,
}

impl World {
    fn inside(&self, py: Python<'_>) -> PyResult<Inside> {
        self.inside.with(Clone::clone).map_err(|why| gone(py, "world", why))
    }

    pub(super) fn shape(&self) -> WorldShape {
        self.shape
    }

    /// A place for a channel, which nobody else in this process gets any more.
    pub(super) fn take(
        &self,
        py: Python<'_>,
        shape: &Shape,
        offset: Option<u64>,
    ) -> PyResult<(Arc<moontide_heap::World>, u64)> {
        let Inside { world, taken } = self.inside(py)?;
        let bytes = shape.bytes().map_err(errors::argument)?;
        let mut taken = taken.lock();
        let offset = offset.unwrap_or_else(|| taken.iter().map(|&(_, end)| end).max().unwrap_or(0));
        let end = offset.checked_add(bytes).filter(|&end| end <= self.shape.bytes);
        let Some(end) = end.filter(|_| offset.is_multiple_of(64)) else {
            let region = self.shape.bytes;
            return Err(errors::argument(format!(
                "a channel of {bytes} bytes at {offset} does not fit into a world with {region} bytes; make it for the sum \
                 of Channel.bytes, and offsets multiples of 64"
            )));
        };
        if taken.iter().any(|&(first, last)| offset < last && first < end) {
            return Err(errors::argument(format!(
                "a channel was opened within {offset} to {end} before; leave the offset out, or make a new world"
            )));
        }
        taken.push((offset, end));
        Ok((world, offset))
    }
}

#[pymethods]
impl World {
    #[new]
    #[pyo3(signature = (path, rank, ranks, bytes, *, timeout=30.0))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        rank: u32,
        ranks: u32,
        bytes: u64,
        timeout: f64,
    ) -> PyResult<World> {
        let page = HugePages::IfAllowed.page_bytes();
        let bytes = bytes.checked_next_multiple_of(page).filter(|&bytes| bytes < 1 << 48);
        let Some(bytes) = bytes else { return Err(errors::argument("a world has less than 2⁴⁸ bytes")) };
        let shape = WorldShape { ranks, bytes };
        let timeout = seconds("timeout", timeout)?;
        let config = WorldConfig { path, rank: Rank(rank), shape, huge: HugePages::IfAllowed, timeout };
        // SAFETY: who joins by this module keeps to the rules, and that others do is said above, and theirs to keep.
        let world = py.detach(|| unsafe { moontide_heap::World::join(&config) });
        let world = Arc::new(world.map_err(|error| errors::world(py, &error))?);
        let inside = OfProcess::new(Inside { world, taken: Arc::default() });
        Ok(World { inside, rank, shape })
    }

    /// Which rank this is.
    #[getter]
    fn rank(&self) -> u32 {
        self.rank
    }

    /// How many there are.
    #[getter]
    fn ranks(&self) -> u32 {
        self.shape.ranks
    }

    /// Memory of each rank.
    #[getter]
    fn bytes(&self) -> u64 {
        self.shape.bytes
    }

    /// Which incarnation of its rank this process is, from 1.
    #[getter]
    fn generation(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.inside(py)?.world.generation().0)
    }

    /// Waits until all ranks are here, and says who they are: fewer than the world's if some were left behind. Raises
    /// RanksMissing: call it again, or leave them behind first.
    #[pyo3(signature = (timeout=30.0))]
    fn barrier<'py>(&self, py: Python<'py>, timeout: f64) -> PyResult<Bound<'py, PyTuple>> {
        let (world, timeout) = (self.inside(py)?.world, seconds("timeout", timeout)?);
        let met = wait_in_slices(py, timeout, |slice| world.barrier(slice).map_err(Refused::Wait))?;
        ranks_tuple(py, met.map_err(|why| why.raise(py))?)
    }

    /// Goes on without these ranks in the world's barrier. Channels have barriers of their own.
    fn leave_behind(&self, py: Python<'_>, ranks: Vec<u32>) -> PyResult<()> {
        let (world, ranks) = (self.inside(py)?.world, rank_set(&ranks, self.shape.ranks)?);
        py.detach(|| world.exclude(ranks));
        Ok(())
    }

    /// A sign of life. Barriers and steps give one; a rank that computes for long may want to.
    fn beat(&self, py: Python<'_>) -> PyResult<()> {
        self.inside(py)?.world.beat();
        Ok(())
    }

    /// What is known of a rank: "alive", "silent" if it has given no sign of life for ``ttl`` seconds, or "absent" if nobody
    /// is in its place.
    #[pyo3(signature = (rank, ttl=10.0))]
    fn liveness(&self, py: Python<'_>, rank: u32, ttl: f64) -> PyResult<&'static str> {
        rank_set(&[rank], self.shape.ranks)?;
        let world = self.inside(py)?.world;
        Ok(match world.liveness(Rank(rank), seconds("ttl", ttl)?) {
            Liveness::Absent => "absent",
            Liveness::Alive(_) => "alive",
            Liveness::Silent(..) => "silent",
        })
    }

    /// Leaves, once the channels that were opened in it are closed as well. A second time it does nothing.
    fn close(&self, py: Python<'_>) {
        let taken = self.inside.take();
        py.detach(|| drop(taken));
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        let WorldShape { ranks, bytes } = self.shape;
        format!("<moontide.ep.World rank {} of {ranks}, {bytes} bytes each>", self.rank)
    }
}

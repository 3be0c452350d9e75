//! [`World`]: the ranks of a host and their shared memory.

use std::path::PathBuf;
use std::sync::Arc;

use moontide_ep::ChannelConfig;
use moontide_heap::{HugePages, Liveness};
use moontide_symmetric::{Rank, RankSet, WorldConfig, WorldShape};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::step::{StepError, wait_in_slices};
use crate::arguments::seconds;
use crate::errors;
use crate::process::{ProcessLocal, unusable_error};

/// Converts ranks to a tuple.
pub(super) fn ranks_tuple(py: Python<'_>, ranks: RankSet) -> PyResult<Bound<'_, PyTuple>> {
    PyTuple::new(py, ranks.iter().map(|rank| rank.0).collect::<Vec<_>>())
}

/// Converts a list of ranks, and checks them.
pub(super) fn rank_set(ranks: &[u32], of: u32) -> PyResult<RankSet> {
    match ranks.iter().find(|&&rank| rank >= of) {
        Some(rank) => Err(errors::argument(format!("there is no rank {rank}; the world has {of} ranks"))),
        None => Ok(ranks.iter().map(|&rank| Rank(rank)).collect()),
    }
}

/// World of ranks: processes of one host that map each other's memory. Joining waits for all ranks.
///
/// - ``path``: name of the world: the Unix socket of rank 0. Processes of the same user can join.
/// - ``rank``: rank of this process; ``ranks``: number of ranks, the same for all.
/// - ``bytes``: memory of each rank, the same for all: the sum of ``Channel.bytes`` of all its channels.
///
/// A process that replaces a dead rank joins without waiting. If rank 0 dies, the other ranks continue, but no process
/// can join any more. Ranks write to each other's memory: run only trusted programs.
///
/// >>> import os, tempfile
/// >>> from moontide.ep import World
/// >>> with World(os.path.join(tempfile.mkdtemp(), "ep"), rank=0, ranks=1, bytes=1 << 20) as world:
/// ...     world.barrier(), world.generation, world.liveness(0)
/// ((0,), 1, 'alive')
#[pyclass(module = "moontide.ep", frozen)]
#[derive(Debug)]
pub(crate) struct World {
    inner: ProcessLocal<WorldInner>,
    rank: u32,
    shape: WorldShape,
}

#[derive(Clone, Debug)]
struct WorldInner {
    world: Arc<moontide_symmetric::World>,
    /// Ranges of the regions that channels use: offset and end of each.
    taken: Arc<Mutex<Vec<(u64, u64)>>>,
}

impl World {
    fn inner(&self, py: Python<'_>) -> PyResult<WorldInner> {
        self.inner.with(Clone::clone).map_err(|reason| unusable_error(py, "world", reason))
    }

    pub(super) fn shape(&self) -> WorldShape {
        self.shape
    }

    /// Takes a range for a channel. No other channel of this process gets it afterwards.
    pub(super) fn take(
        &self,
        py: Python<'_>,
        shape: &ChannelConfig,
        offset: Option<u64>,
    ) -> PyResult<(Arc<moontide_symmetric::World>, u64)> {
        let WorldInner { world, taken } = self.inner(py)?;
        let bytes = shape.bytes().map_err(errors::argument)?;
        let mut taken = taken.lock();
        let offset = offset.unwrap_or_else(|| taken.iter().map(|&(_, end)| end).max().unwrap_or(0));
        let end = offset.checked_add(bytes).filter(|&end| end <= self.shape.bytes);
        let Some(end) = end.filter(|_| offset.is_multiple_of(64)) else {
            let region = self.shape.bytes;
            return Err(errors::argument(format!(
                "a channel of {bytes} bytes at offset {offset} does not fit into a world of {region} bytes; create the \
                 world with the sum of Channel.bytes, and use offsets that are multiples of 64"
            )));
        };
        if taken.iter().any(|&(first, last)| offset < last && first < end) {
            return Err(errors::argument(format!(
                "a channel was opened within {offset} to {end} before; omit the offset, or create a new world"
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
        let page = HugePages::Auto.page_bytes();
        let bytes = bytes.checked_next_multiple_of(page).filter(|&bytes| bytes < 1 << 48);
        let Some(bytes) = bytes else { return Err(errors::argument("bytes must be below 2⁴⁸")) };
        let shape = WorldShape { ranks, bytes };
        let timeout = seconds("timeout", timeout)?;
        let config = WorldConfig { path, rank: Rank(rank), shape, huge: HugePages::Auto, timeout };
        // SAFETY: ranks that join through this module follow the protocol; the docstring requires the same of all
        // others.
        let world = py.detach(|| unsafe { moontide_symmetric::World::join(&config) });
        let world = Arc::new(world.map_err(|error| errors::world(py, &error))?);
        let inner = ProcessLocal::new(WorldInner { world, taken: Arc::default() });
        Ok(World { inner, rank, shape })
    }

    /// Rank of this process.
    #[getter]
    fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of ranks.
    #[getter]
    fn ranks(&self) -> u32 {
        self.shape.ranks
    }

    /// Memory of each rank in bytes.
    #[getter]
    fn bytes(&self) -> u64 {
        self.shape.bytes
    }

    /// Generation of this process in its rank, from 1.
    #[getter]
    fn generation(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.inner(py)?.world.generation().0)
    }

    /// Waits until all members arrive, and returns them; excluded ranks are not members. Raises RanksMissing: retry, or
    /// ``exclude`` the missing ranks and retry.
    #[pyo3(signature = (timeout=30.0))]
    fn barrier<'py>(&self, py: Python<'py>, timeout: f64) -> PyResult<Bound<'py, PyTuple>> {
        let (world, timeout) = (self.inner(py)?.world, seconds("timeout", timeout)?);
        let members = wait_in_slices(py, timeout, |slice| world.barrier(slice).map_err(StepError::Wait))?;
        ranks_tuple(py, members.map_err(|error| error.raise(py))?)
    }

    /// Excludes ranks from the barrier of the world. Channels have their own barriers.
    fn exclude(&self, py: Python<'_>, ranks: Vec<u32>) -> PyResult<()> {
        let (world, ranks) = (self.inner(py)?.world, rank_set(&ranks, self.shape.ranks)?);
        py.detach(|| world.exclude(ranks));
        Ok(())
    }

    /// Sends a heartbeat. Barriers and steps do it too; call this during long computations.
    fn heartbeat(&self, py: Python<'_>) -> PyResult<()> {
        self.inner(py)?.world.heartbeat();
        Ok(())
    }

    /// Returns the state of a rank: "alive", "silent" if its last heartbeat is older than ``ttl`` seconds, or "absent"
    /// if no process has joined as this rank.
    #[pyo3(signature = (rank, ttl=10.0))]
    fn liveness(&self, py: Python<'_>, rank: u32, ttl: f64) -> PyResult<&'static str> {
        rank_set(&[rank], self.shape.ranks)?;
        let world = self.inner(py)?.world;
        Ok(match world.liveness(Rank(rank), seconds("ttl", ttl)?) {
            Liveness::Absent => "absent",
            Liveness::Alive(_) => "alive",
            Liveness::Silent(..) => "silent",
        })
    }

    /// Leaves the world when all its channels are closed as well. Further calls of close() do nothing.
    fn close(&self, py: Python<'_>) {
        let taken = self.inner.take();
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

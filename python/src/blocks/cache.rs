//! [`BlockCache`]: the cache.

use std::ptr::NonNull;
use std::sync::Arc;

use moontide_blocks::{
    Arena, BLOCKS_MAX, BlockHash, BlockPlacement, Cache, CacheConfig, CacheError, CacheShape, PrunePolicy,
    RowIndex, SequenceId,
};
use moontide_client::RemoteBlockStore;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyDict, PyString};

use super::pinned::{PinnedBlocks, SequenceView, SuspendedSequence};
use super::rows::{MemoryOwner, Rows};
use super::shape::{self, ElementKind};
use super::writer::SequenceWriter;
use crate::arguments::PutOptions;
use crate::errors;
use crate::process::{ProcessLocal, unusable_error};
use crate::store::Store;

/// Runs a short call under a lock. Keeps the GIL unless it has to wait for the lock. The call must not use Python
/// objects.
pub(crate) fn locked<T: Send, R: Send>(
    py: Python<'_>,
    shared: &Mutex<T>,
    call: impl FnOnce(&mut T) -> R + Send,
) -> R {
    if let Some(mut free) = shared.try_lock() {
        return call(&mut free);
    }
    py.detach(|| call(&mut shared.lock()))
}

/// Location of the rows of consecutive tokens.
#[derive(Debug)]
pub(crate) struct RowView {
    /// Address of the first row; its provenance is exposed.
    pub(crate) address: usize,
    tokens: usize,
    token: usize,
    head: usize,
}

impl RowView {
    pub(crate) fn new(start: NonNull<u8>, tokens: usize, token: usize, head: usize) -> RowView {
        RowView { address: start.as_ptr().expose_provenance(), tokens, token, head }
    }

    /// Returns length and stride of all dimensions but the last.
    pub(crate) fn outer(&self, kind: &ElementKind) -> [(usize, usize); 2] {
        [(self.tokens, self.token), (kind.shape.heads(), self.head)]
    }
}

/// Returns a block store for a store and the prefix of a namespace.
pub(crate) fn block_store(
    py: Python<'_>,
    store: &Bound<'_, Store>,
    namespace: &Bound<'_, PyAny>,
    part: &str,
    options: Option<&Bound<'_, PutOptions>>,
) -> PyResult<RemoteBlockStore> {
    let prefix = match namespace.is_instance_of::<PyString>() {
        true => namespace.clone(),
        false => namespace.getattr("prefix")?,
    };
    let prefix: String = prefix.extract()?;
    let options =
        options.map_or_else(moontide_client::PutOptions::default, |options| options.get().0.clone());
    Ok(RemoteBlockStore::new(store.get().client(py)?, &prefix, part, options))
}

/// Returns block numbers as a numpy array of int32.
pub(crate) fn table(py: Python<'_>, blocks: impl Iterator<Item = u32>) -> PyResult<Bound<'_, PyAny>> {
    let bytes: Vec<u8> = blocks.flat_map(u32::to_ne_bytes).collect();
    py.import("numpy")?.call_method1("frombuffer", (PyByteArray::new(py, &bytes), "=i4"))
}

/// Paged KV cache in this process: blocks of tokens, sequences that share blocks, and methods that save blocks to a
/// store and restore them.
///
/// A sequence is identified by an integer. The id of a freed sequence is never reused: calls with it raise
/// UnknownSequence.
///
/// - ``layers``, ``kv_heads``, ``dim``: shape of the model; or ``latent=(rank, rope)`` for one compressed vector (MLA).
/// - ``dtype``: "bfloat16", "float16", "float32", "float8_e4m3fn" (or "float8"), "float8_e5m2".
/// - ``blocks``: number of blocks of ``block_tokens`` tokens. ``blocks_max``: limit of ``resize``; it reserves address
///   space, not memory.
/// - ``layout_order``: "token": the heads of a token are adjacent; "head": the tokens of a head are adjacent.
/// - ``contiguous``: the blocks of a sequence are adjacent, with this number of free blocks reserved behind them;
///   nothing is shared.
///
/// Calls of several threads are serialized.
///
/// >>> import numpy
/// >>> from moontide.blocks import BlockCache
/// >>> cache = BlockCache(layers=2, kv_heads=2, dim=8, block_tokens=4, dtype="float32", blocks=64)
/// >>> prompt = list(range(10))
/// >>> seq, cached_tokens = cache.allocate(prompt)
/// >>> with cache.writer(seq) as writer:
/// ...     for layer in range(2):
/// ...         writer.write("k", layer, numpy.zeros((10, 2, 8), "float32"))
/// ...         writer.write("v", layer, numpy.ones((10, 2, 8), "float32"))
/// ...     writer.mark_written(10)
/// >>> other, cached_tokens = cache.allocate(prompt)  # a sequence with the same prefix shares its two full blocks
/// >>> cached_tokens, cache.stats()["shared"]
/// (8, 2)
#[pyclass(module = "moontide.blocks", frozen)]
#[derive(Debug)]
pub(crate) struct BlockCache {
    inner: ProcessLocal<CacheInner>,
    kind: ElementKind,
    blocks_max: u32,
}

#[derive(Clone, Debug)]
struct CacheInner {
    cache: Arc<Mutex<Cache>>,
    arena: Arc<Arena>,
}

impl BlockCache {
    fn inner(&self, py: Python<'_>) -> PyResult<CacheInner> {
        self.inner.with(Clone::clone).map_err(|reason| unusable_error(py, "cache", reason))
    }

    /// Runs a short call, usually with the GIL held.
    fn call<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Cache) -> Result<R, CacheError> + Send,
    ) -> PyResult<R> {
        let inner = self.inner(py)?;
        locked(py, &inner.cache, call).map_err(|error| errors::blocks(py, &error))
    }

    /// Runs a call that copies, hashes or uses a store, with the GIL released.
    fn call_long<R: Send>(&self, py: Python<'_>, call: impl FnOnce(&mut Cache) -> R + Send) -> PyResult<R> {
        let inner = self.inner(py)?;
        Ok(py.detach(|| call(&mut inner.cache.lock())))
    }
}

fn id(sequence: u64) -> SequenceId {
    SequenceId::from_bits(sequence)
}

#[pymethods]
impl BlockCache {
    #[new]
    #[pyo3(signature = (*, layers, blocks, kv_heads=None, dim=None, latent=None, block_tokens=16, dtype="bfloat16",
        blocks_max=None, layout_order="token", contiguous=None, sequences_max=4096))]
    #[allow(clippy::too_many_arguments)] // keywords of a constructor
    fn new(
        py: Python<'_>,
        layers: u32,
        blocks: u32,
        kv_heads: Option<u32>,
        dim: Option<u32>,
        latent: Option<(u32, u32)>,
        block_tokens: u32,
        dtype: &str,
        blocks_max: Option<u32>,
        layout_order: &str,
        contiguous: Option<u32>,
        sequences_max: u32,
    ) -> PyResult<BlockCache> {
        let attention = shape::attention(kv_heads, dim, latent)?;
        let (kind, dtype) = shape::dtype(dtype)?;
        let order = shape::layout_order(layout_order)?;
        let shape = CacheShape { layers, block_tokens, attention, dtype: kind, order };
        let blocks_max = blocks_max.unwrap_or(blocks);
        if !(1..=blocks_max).contains(&blocks) || blocks_max > BLOCKS_MAX {
            return Err(errors::argument(format!(
                "blocks must be 1 to blocks_max, and blocks_max at most {BLOCKS_MAX}, not {blocks} and {blocks_max}"
            )));
        }
        if !(1..=SEQUENCES_MAX).contains(&sequences_max) {
            return Err(errors::argument(format!(
                "sequences_max must be 1 to {SEQUENCES_MAX}, not {sequences_max}"
            )));
        }
        let placement = match contiguous {
            Some(reserve) => BlockPlacement::Contiguous { reserve: reserve.min(blocks_max) },
            None => BlockPlacement::Paged,
        };
        let config = CacheConfig {
            blocks_max,
            sequences_max,
            // Views hold reference counts on blocks and need no reader cell.
            readers_max: 1,
            placement,
            ..CacheConfig::new(shape, blocks)
        };
        let cache = py.detach(|| Cache::new(&config)).map_err(|error| errors::arena(py, &error))?;
        let arena = Arc::clone(cache.arena());
        let inner = ProcessLocal::new(CacheInner { cache: Arc::new(Mutex::new(cache)), arena });
        Ok(BlockCache { inner, kind: ElementKind { shape, dtype }, blocks_max })
    }

    /// Number of tokens per block.
    #[getter]
    fn block_tokens(&self) -> u32 {
        self.kind.shape.block_tokens
    }

    /// Size of a block in bytes: all its planes, layers, tokens and heads.
    #[getter]
    fn block_bytes(&self) -> usize {
        self.kind.shape.block_bytes()
    }

    /// Upper limit of ``resize``.
    #[getter]
    fn blocks_max(&self) -> u32 {
        self.blocks_max
    }

    /// Element type, by its name in torch.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.kind.dtype.name()
    }

    /// Description of the block format, for the ``layout`` of a Namespace. Caches with different block formats have
    /// different descriptions.
    #[getter]
    fn layout(&self) -> String {
        self.kind.shape.to_string()
    }

    // ------------------------------------------------------------------------------------------------- sequences

    /// Creates a sequence. Returns its id, and the number of tokens of its prefix that are cached and need not be
    /// computed. The last token never counts as cached. Sequences with a different ``salt`` (tenant) or ``adapter`` do
    /// not share blocks. Raises OutOfBlocks if there are not enough free blocks.
    #[pyo3(signature = (tokens, salt="", adapter=""))]
    fn allocate(
        &self,
        py: Python<'_>,
        tokens: Vec<u32>,
        salt: &str,
        adapter: &str,
    ) -> PyResult<(u64, usize)> {
        let allocated = self.call_long(py, |cache| {
            let root = BlockHash::root(salt, adapter);
            cache.allocate(&tokens, root)
        })?;
        let allocated = allocated.map_err(|error| errors::blocks(py, &error))?;
        Ok((allocated.id.to_bits(), allocated.cached_tokens))
    }

    /// Appends a token; its rows are not written yet. Raises OutOfBlocks, and changes nothing, if no block is free.
    fn append(&self, py: Python<'_>, sequence: u64, token: u32) -> PyResult<()> {
        self.call(py, |cache| cache.append(id(sequence), token))
    }

    /// Returns a writer for the rows of all tokens that have none yet.
    fn writer(&self, py: Python<'_>, sequence: u64) -> PyResult<SequenceWriter> {
        let writer = self.call(py, |cache| cache.writer(id(sequence)))?;
        let CacheInner { cache, arena } = self.inner(py)?;
        let start = arena.base().as_ptr() as usize;
        let bytes = self.kind.shape.block_bytes() * self.blocks_max as usize;
        Ok(SequenceWriter::new(writer, cache, self.kind, start..start + bytes))
    }

    /// Creates a second sequence with the same complete tokens. Both share their blocks until one of them writes.
    fn fork(&self, py: Python<'_>, sequence: u64) -> PyResult<u64> {
        let forked = self.call_long(py, |cache| cache.fork(id(sequence)))?;
        Ok(forked.map_err(|error| errors::blocks(py, &error))?.to_bits())
    }

    /// Removes tokens from the end, down to ``tokens`` tokens.
    fn truncate(&self, py: Python<'_>, sequence: u64, tokens: usize) -> PyResult<()> {
        self.call(py, |cache| cache.truncate(id(sequence), tokens))
    }

    /// Frees a sequence. Its full blocks remain cached until their memory is needed.
    fn free(&self, py: Python<'_>, sequence: u64) -> PyResult<()> {
        self.call(py, |cache| cache.free(id(sequence)))
    }

    /// Returns the ids of all sequences.
    fn sequences(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        self.call(py, |cache| Ok(cache.sequences().map(SequenceId::to_bits).collect()))
    }

    /// Returns the tokens of a sequence, complete or not.
    fn tokens(&self, py: Python<'_>, sequence: u64) -> PyResult<Vec<u32>> {
        self.call(py, |cache| cache.tokens(id(sequence)).map(<[u32]>::to_vec))
    }

    /// Returns the number of complete tokens of a sequence.
    fn computed_tokens(&self, py: Python<'_>, sequence: u64) -> PyResult<usize> {
        self.call(py, |cache| cache.computed_tokens(id(sequence)))
    }

    /// Returns the hashes of the full blocks of a sequence. Keys in a store contain them.
    fn hashes<'py>(&self, py: Python<'py>, sequence: u64) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let hashes = self.call(py, |cache| cache.hashes_of(id(sequence)).map(<[BlockHash]>::to_vec))?;
        Ok(hashes.iter().map(|hash| PyBytes::new(py, &hash.0)).collect())
    }

    // ------------------------------------------------------------------------------------------------------ rows

    /// Returns a zero-copy view of the complete tokens of a sequence.
    fn view(&self, py: Python<'_>, sequence: u64) -> PyResult<SequenceView> {
        let pinned = self.call(py, |cache| cache.pin(id(sequence)))?;
        Ok(SequenceView::new(pinned, self.kind))
    }

    /// Returns the blocks of a sequence as a numpy array of int32, for kernels. Includes blocks of incomplete tokens.
    fn block_table<'py>(&self, py: Python<'py>, sequence: u64) -> PyResult<Bound<'py, PyAny>> {
        let blocks = self.call(py, |cache| cache.blocks_of(id(sequence)))?;
        table(py, blocks.into_iter())
    }

    /// Returns the keys or values of a whole layer, ``[blocks_max, block_tokens, heads, dim]``, as paged kernels take
    /// them together with block tables. Accesses are not checked: the array is writable and shows the current content
    /// of every block. Write only rows of tokens that have a writer, and read only rows of sequences that are not freed
    /// meanwhile.
    fn arena<'py>(&self, py: Python<'py>, plane: &str, layer: u32) -> PyResult<Bound<'py, Rows>> {
        let (plane, layer) = self.kind.plane_and_layer(plane, layer)?;
        let CacheInner { arena, .. } = self.inner(py)?;
        let strides = *arena.strides();
        let start = arena.row(RowIndex { plane, layer, block: 0, token: 0, head: 0 });
        let outer = [
            (self.blocks_max as usize, strides.block),
            (self.kind.shape.block_tokens as usize, strides.token),
            (self.kind.shape.heads(), strides.head),
        ];
        let address = start.as_ptr().expose_provenance();
        // SAFETY: every row of the layer, in memory that lives as long as the arena.
        Bound::new(py, unsafe { Rows::new(MemoryOwner::Arena(arena), &self.kind, address, &outer) })
    }

    // ----------------------------------------------------------------------------------------------------- store

    /// Pins the full blocks of a sequence until the result is released, so that any thread can save them.
    fn pin_blocks(&self, py: Python<'_>, sequence: u64) -> PyResult<PinnedBlocks> {
        self.call(py, |cache| cache.pin_full_blocks(id(sequence))).map(PinnedBlocks::new)
    }

    /// Saves the full blocks of a sequence that the store is not known to have. Returns whether the store has all of
    /// them now. Other threads can use the cache meanwhile.
    ///
    /// ``namespace`` is a ``moontide.kv.Namespace``, or its prefix; see ``namespace_of``. ``part`` names the part of a
    /// block that this process has, if several processes share a model.
    #[pyo3(signature = (sequence, store, namespace, *, part="0", options=None))]
    fn spill(
        &self,
        py: Python<'_>,
        sequence: u64,
        store: &Bound<'_, Store>,
        namespace: &Bound<'_, PyAny>,
        part: &str,
        options: Option<&Bound<'_, PutOptions>>,
    ) -> PyResult<bool> {
        let store = block_store(py, store, namespace, part, options)?;
        let mut pinned = self.call(py, |cache| cache.pin_full_blocks(id(sequence)))?;
        py.detach(|| pinned.save(&store)).map_err(|error| errors::store(py, &error))
    }

    /// Loads the missing part of the longest stored prefix of a sequence. Returns the number of loaded tokens. Does not
    /// load the last token. Blocks the cache; ``writer(...).restore(...)`` does the same without blocking it.
    #[pyo3(signature = (sequence, store, namespace, *, part="0"))]
    fn restore(
        &self,
        py: Python<'_>,
        sequence: u64,
        store: &Bound<'_, Store>,
        namespace: &Bound<'_, PyAny>,
        part: &str,
    ) -> PyResult<usize> {
        let store = block_store(py, store, namespace, part, None)?;
        let restored = self.call_long(py, |cache| cache.restore(id(sequence), &store))?;
        restored.map_err(|error| errors::suspend(py, &error))
    }

    /// Saves all blocks of a sequence, including a partial last block, and frees it. ``resume`` restores it, in this or
    /// another process. Blocks the cache.
    #[pyo3(signature = (sequence, store, namespace, *, part="0", options=None))]
    fn suspend(
        &self,
        py: Python<'_>,
        sequence: u64,
        store: &Bound<'_, Store>,
        namespace: &Bound<'_, PyAny>,
        part: &str,
        options: Option<&Bound<'_, PutOptions>>,
    ) -> PyResult<SuspendedSequence> {
        let store = block_store(py, store, namespace, part, options)?;
        let suspended = self.call_long(py, |cache| cache.suspend(id(sequence), &store))?;
        suspended.map(SuspendedSequence).map_err(|error| errors::suspend(py, &error))
    }

    /// Restores a suspended sequence with all its tokens. ``computed_tokens`` returns how many of them are complete;
    /// tokens that neither the cache nor the store has must be computed again. Blocks the cache.
    #[pyo3(signature = (suspended, store, namespace, *, part="0"))]
    fn resume(
        &self,
        py: Python<'_>,
        suspended: &Bound<'_, SuspendedSequence>,
        store: &Bound<'_, Store>,
        namespace: &Bound<'_, PyAny>,
        part: &str,
    ) -> PyResult<u64> {
        let store = block_store(py, store, namespace, part, None)?;
        let suspended = &suspended.get().0;
        let resumed = self.call_long(py, |cache| cache.resume(suspended, &store))?;
        Ok(resumed.map_err(|error| errors::suspend(py, &error))?.to_bits())
    }

    // --------------------------------------------------------------------------------------------------- pruning

    /// Adds scores to the tokens of a sequence, from the first token on; for example the attention that each received.
    fn add_scores(&self, py: Python<'_>, sequence: u64, scores: Vec<f32>) -> PyResult<()> {
        self.call(py, |cache| cache.add_scores(id(sequence), &scores))
    }

    /// Drops tokens of a sequence, down to ``tokens_max`` tokens: keeps the first ``sink_tokens``, the last
    /// ``recent_tokens``, and those with the highest scores. Returns the original positions of the kept tokens.
    #[pyo3(signature = (sequence, *, sink_tokens, recent_tokens, tokens_max))]
    fn prune(
        &self,
        py: Python<'_>,
        sequence: u64,
        sink_tokens: usize,
        recent_tokens: usize,
        tokens_max: usize,
    ) -> PyResult<Vec<u32>> {
        let policy = PrunePolicy { sink_tokens, recent_tokens, tokens_max };
        let pruned = self.call_long(py, |cache| cache.prune(id(sequence), &policy))?;
        pruned.map_err(|error| errors::blocks(py, &error))
    }

    /// Returns the original position of each token of a sequence, with which its rotary embedding was computed.
    fn positions(&self, py: Python<'_>, sequence: u64) -> PyResult<Vec<u32>> {
        self.call(py, |cache| cache.positions(id(sequence)))
    }

    // ----------------------------------------------------------------------------------------------------- cache

    /// Changes the number of blocks. Raises OutOfBlocks, and changes nothing, if more blocks are in use.
    fn resize(&self, py: Python<'_>, blocks: u32) -> PyResult<()> {
        if blocks > self.blocks_max {
            let max = self.blocks_max;
            return Err(errors::argument(format!("{blocks} blocks exceed blocks_max, which is {max}")));
        }
        let resized = self.call_long(py, |cache| cache.resize(blocks))?;
        resized.map_err(|error| errors::blocks(py, &error))
    }

    /// Drops all cached blocks that no sequence uses.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |cache| {
            cache.clear();
            Ok(())
        })
    }

    /// Returns block counts, with ``held + cached + waiting + reserved + free == blocks`` unless the cache is
    /// shrinking, and counters since its creation.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (stats, shrinking) = self.call(py, |cache| Ok((cache.stats(), cache.is_shrinking())))?;
        let out = PyDict::new(py);
        let counts = stats.counts;
        let numbers = [
            ("blocks", u64::from(stats.blocks)),
            ("free", u64::from(stats.free)),
            ("in_use", u64::from(stats.in_use)),
            ("shared", u64::from(stats.shared)),
            ("cached", u64::from(stats.cached)),
            ("held_by_readers", u64::from(stats.held_by_readers)),
            ("reserved", u64::from(stats.reserved)),
            ("block_bytes", stats.block_bytes as u64),
            ("sequences", u64::from(stats.sequences)),
            ("tokens", stats.tokens),
            ("prompt_tokens", counts.prompt_tokens),
            ("cached_tokens", counts.cached_tokens),
            ("restored_tokens", counts.restored_tokens),
            ("forks", counts.forks),
            ("suspended", counts.suspended),
            ("copied_blocks", counts.copied_blocks),
            ("moved_blocks", counts.moved_blocks),
            ("evicted_blocks", counts.evicted_blocks),
            ("pruned_tokens", counts.pruned_tokens),
        ];
        for (name, number) in numbers {
            out.set_item(name, number)?;
        }
        out.set_item("fragmentation", stats.fragmentation)?;
        out.set_item("shrinking", shrinking)?;
        Ok(out)
    }

    /// Returns a human-readable description of all sequences.
    fn dump(&self, py: Python<'_>) -> PyResult<String> {
        self.call(py, |cache| Ok(cache.dump()))
    }

    /// Returns a human-readable map of all blocks, one character per block.
    fn block_map(&self, py: Python<'_>) -> PyResult<String> {
        self.call(py, |cache| Ok(cache.block_map()))
    }

    fn __repr__(&self) -> String {
        format!("<moontide.blocks.BlockCache of {}>", self.kind.shape)
    }
}

/// Limit of `sequences_max`: every sequence slot takes memory, and no inference engine runs more sequences.
const SEQUENCES_MAX: u32 = 1 << 20;

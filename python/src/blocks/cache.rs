//! [`BlockCache`]: the cache itself.

use std::ptr::NonNull;
use std::sync::Arc;

use moontide_blocks::{
    Arena, At, BLOCKS_MAX, BlockHash, BlocksError, Cache, CacheConfig, Keep, Placement, SequenceId, Shape,
};
use moontide_client::BlockStore;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyDict, PyString};

use super::fill::Fill;
use super::held::{Held, Parked, SequenceView};
use super::rows::{Keeper, Rows};
use super::shape::{self, Kind};
use crate::arguments::PutOptions;
use crate::errors;
use crate::process::{OfProcess, gone};
use crate::store::Store;

/// Runs a call with something that calls take turns with. Short ones, which go on with Python's lock held unless they have
/// to wait. The call touches nothing of Python.
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

/// Where rows of some tokens are.
#[derive(Debug)]
pub(crate) struct Place {
    /// Of the first one; its provenance is exposed.
    pub(crate) address: usize,
    tokens: usize,
    token: usize,
    head: usize,
}

impl Place {
    pub(crate) fn new(start: NonNull<u8>, tokens: usize, token: usize, head: usize) -> Place {
        Place { address: start.as_ptr().expose_provenance(), tokens, token, head }
    }

    /// All dimensions but the last: how many, and how far apart.
    pub(crate) fn outer(&self, kind: &Kind) -> [(usize, usize); 2] {
        [(self.tokens, self.token), (kind.shape.heads(), self.head)]
    }
}

/// A store as a place for blocks, under the prefix of a namespace.
pub(crate) fn block_store(
    py: Python<'_>,
    store: &Bound<'_, Store>,
    namespace: &Bound<'_, PyAny>,
    part: &str,
    options: Option<&Bound<'_, PutOptions>>,
) -> PyResult<BlockStore> {
    let named = match namespace.is_instance_of::<PyString>() {
        true => namespace.clone(),
        false => namespace.getattr("prefix")?,
    };
    let prefix: String = named.extract()?;
    let options =
        options.map_or_else(moontide_client::PutOptions::default, |options| options.get().0.clone());
    Ok(BlockStore::new(store.get().client(py)?, &prefix, part, options))
}

/// Numbers of blocks as a numpy array of int32.
pub(crate) fn table(py: Python<'_>, blocks: impl Iterator<Item = u32>) -> PyResult<Bound<'_, PyAny>> {
    let bytes: Vec<u8> = blocks.flat_map(u32::to_ne_bytes).collect();
    py.import("numpy")?.call_method1("frombuffer", (PyByteArray::new(py, &bytes), "=i4"))
}

/// A paged KV cache in this process: blocks of tokens, sequences that share them, and a way to and from a store.
///
/// A sequence is a number. One that was freed stays unknown for ever: calls with it raise UnknownSequence.
///
/// - ``layers``, ``kv_heads``, ``dim``: of the model; or ``latent=(rank, rope)`` for one compressed vector (MLA).
/// - ``dtype``: "bfloat16", "float16", "float32", "float8_e4m3fn" (or "float8"), "float8_e5m2".
/// - ``blocks`` of ``block_tokens`` tokens each; ``resize`` goes up to ``blocks_max``, which costs addresses only.
/// - ``order``: "token" keeps the heads of a token together, "head" the tokens of a head.
/// - ``contiguous``: blocks of a sequence follow each other, with so many kept free behind it; nothing is shared then.
///
/// Calls of several threads take turns.
///
/// >>> import numpy
/// >>> from moontide.blocks import BlockCache
/// >>> cache = BlockCache(layers=2, kv_heads=2, dim=8, block_tokens=4, dtype="float32", blocks=64)
/// >>> prompt = list(range(10))
/// >>> seq, shared = cache.allocate(prompt)
/// >>> with cache.fill(seq) as fill:
/// ...     for layer in range(2):
/// ...         fill.write("k", layer, numpy.zeros((10, 2, 8), "float32"))
/// ...         fill.write("v", layer, numpy.ones((10, 2, 8), "float32"))
/// ...     fill.complete(10)
/// >>> other, shared = cache.allocate(prompt)  # the next one with the same beginning has two blocks of it already
/// >>> shared, cache.stats()["shared"]
/// (8, 2)
#[pyclass(module = "moontide.blocks", frozen)]
#[derive(Debug)]
pub(crate) struct BlockCache {
    inside: OfProcess<Inside>,
    kind: Kind,
    blocks_max: u32,
}

#[derive(Clone, Debug)]
struct Inside {
    cache: Arc<Mutex<Cache>>,
    arena: Arc<Arena>,
}

impl BlockCache {
    fn inside(&self, py: Python<'_>) -> PyResult<Inside> {
        self.inside.with(Clone::clone).map_err(|why| gone(py, "cache", why))
    }

    /// A short call.
    fn call<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Cache) -> Result<R, BlocksError> + Send,
    ) -> PyResult<R> {
        let inside = self.inside(py)?;
        locked(py, &inside.cache, call).map_err(|error| errors::blocks(py, &error))
    }

    /// One that copies, hashes or asks a store: with Python's lock released.
    fn call_long<R: Send>(&self, py: Python<'_>, call: impl FnOnce(&mut Cache) -> R + Send) -> PyResult<R> {
        let inside = self.inside(py)?;
        Ok(py.detach(|| call(&mut inside.cache.lock())))
    }
}

fn id(sequence: u64) -> SequenceId {
    SequenceId::from_bits(sequence)
}

#[pymethods]
impl BlockCache {
    #[new]
    #[pyo3(signature = (*, layers, blocks, kv_heads=None, dim=None, latent=None, block_tokens=16, dtype="bfloat16",
        blocks_max=None, order="token", contiguous=None, sequences_max=4096))]
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
        order: &str,
        contiguous: Option<u32>,
        sequences_max: u32,
    ) -> PyResult<BlockCache> {
        let attention = shape::attention(kv_heads, dim, latent)?;
        let (kind, dtype) = shape::dtype(dtype)?;
        let shape = Shape { layers, block_tokens, attention, dtype: kind, order: shape::order(order)? };
        let blocks_max = blocks_max.unwrap_or(blocks);
        if !(1..=blocks_max).contains(&blocks) || blocks_max > BLOCKS_MAX {
            return Err(errors::argument(format!(
                "blocks must be 1 to blocks_max, and that at most {BLOCKS_MAX}, not {blocks} and {blocks_max}"
            )));
        }
        if !(1..=SEQUENCES_MAX).contains(&sequences_max) {
            return Err(errors::argument(format!(
                "sequences_max must be 1 to {SEQUENCES_MAX}, not {sequences_max}"
            )));
        }
        let placement = match contiguous {
            Some(reserve) => Placement::Contiguous { reserve: reserve.min(blocks_max) },
            None => Placement::Paged,
        };
        let config = CacheConfig {
            blocks_max,
            sequences_max,
            // Views hold blocks, and need no cell.
            readers_max: 1,
            placement,
            ..CacheConfig::new(shape, blocks)
        };
        let cache = py.detach(|| Cache::new(&config)).map_err(|error| errors::arena(py, &error))?;
        let arena = Arc::clone(cache.arena());
        let inside = OfProcess::new(Inside { cache: Arc::new(Mutex::new(cache)), arena });
        Ok(BlockCache { inside, kind: Kind { shape, dtype }, blocks_max })
    }

    /// Tokens of a block.
    #[getter]
    fn block_tokens(&self) -> u32 {
        self.kind.shape.block_tokens
    }

    /// Bytes of a block: all its planes, layers, tokens and heads.
    #[getter]
    fn block_bytes(&self) -> usize {
        self.kind.shape.block_bytes()
    }

    /// The most blocks that it can grow to.
    #[getter]
    fn blocks_max(&self) -> u32 {
        self.blocks_max
    }

    /// What a number is, by the name that torch has for it.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.kind.dtype.name()
    }

    /// A line that is different for caches whose blocks mean different things: the ``layout`` of a Namespace.
    #[getter]
    fn layout(&self) -> String {
        self.kind.shape.to_string()
    }

    // ------------------------------------------------------------------------------------------------- sequences

    /// A new sequence of these tokens, and how many of them, from the first, need not be computed because another sequence
    /// with the same beginning left them. The last token is never among them. Sequences with another ``salt`` (tenant) or
    /// ``adapter`` find nothing of each other's. Raises NoBlocks if there is no room.
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
        Ok((allocated.id.to_bits(), allocated.shared_tokens))
    }

    /// One more token, whose rows are still to be filled. Raises NoBlocks if there is no room: then nothing has changed.
    fn append(&self, py: Python<'_>, sequence: u64, token: u32) -> PyResult<()> {
        self.call(py, |cache| cache.append(id(sequence), token))
    }

    /// The right to write the rows of all tokens that have none yet.
    fn fill(&self, py: Python<'_>, sequence: u64) -> PyResult<Fill> {
        let fill = self.call(py, |cache| cache.fill(id(sequence)))?;
        let Inside { cache, arena } = self.inside(py)?;
        let start = arena.base().as_ptr() as usize;
        let bytes = self.kind.shape.block_bytes() * self.blocks_max as usize;
        Ok(Fill::new(fill, cache, self.kind, start..start + bytes))
    }

    /// A second sequence with the same complete tokens. Blocks are shared until one of the two writes.
    fn fork(&self, py: Python<'_>, sequence: u64) -> PyResult<u64> {
        let forked = self.call_long(py, |cache| cache.fork(id(sequence)))?;
        Ok(forked.map_err(|error| errors::blocks(py, &error))?.to_bits())
    }

    /// Takes tokens back from the end, so that so many are left.
    fn truncate(&self, py: Python<'_>, sequence: u64, tokens: usize) -> PyResult<()> {
        self.call(py, |cache| cache.truncate(id(sequence), tokens))
    }

    /// The sequence is over. Its full blocks stay findable until they are needed for something else.
    fn free(&self, py: Python<'_>, sequence: u64) -> PyResult<()> {
        self.call(py, |cache| cache.free(id(sequence)))
    }

    /// All sequences that there are.
    fn sequences(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        self.call(py, |cache| Ok(cache.sequences().map(SequenceId::to_bits).collect()))
    }

    /// The tokens of a sequence, complete or not.
    fn tokens(&self, py: Python<'_>, sequence: u64) -> PyResult<Vec<u32>> {
        self.call(py, |cache| cache.tokens(id(sequence)).map(<[u32]>::to_vec))
    }

    /// How many of its tokens are complete.
    fn filled(&self, py: Python<'_>, sequence: u64) -> PyResult<usize> {
        self.call(py, |cache| cache.filled_of(id(sequence)))
    }

    /// The hashes of its full blocks: what they are called in a store.
    fn hashes<'py>(&self, py: Python<'py>, sequence: u64) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let hashes = self.call(py, |cache| cache.hashes_of(id(sequence)).map(<[BlockHash]>::to_vec))?;
        Ok(hashes.iter().map(|hash| PyBytes::new(py, &hash.0)).collect())
    }

    // ------------------------------------------------------------------------------------------------------ rows

    /// The complete tokens of a sequence, to be read in place.
    fn view(&self, py: Python<'_>, sequence: u64) -> PyResult<SequenceView> {
        let held = self.call(py, |cache| cache.pin(id(sequence)))?;
        Ok(SequenceView::new(held, self.kind))
    }

    /// The blocks of a sequence as a numpy array of int32, for kernels; also those of tokens that are not complete.
    fn block_table<'py>(&self, py: Python<'py>, sequence: u64) -> PyResult<Bound<'py, PyAny>> {
        let blocks = self.call(py, |cache| cache.blocks_of(id(sequence)))?;
        table(py, blocks.into_iter())
    }

    /// All of a layer's keys or values, ``[blocks_max, block_tokens, heads, dim]``, as paged kernels take them with block
    /// tables. Nothing is checked: it can be written, and shows whatever is in a block, whoever has it at the moment.
    /// Write rows of tokens that are being filled, and read those of sequences that are not freed meanwhile.
    fn arena<'py>(&self, py: Python<'py>, plane: &str, layer: u32) -> PyResult<Bound<'py, Rows>> {
        let (plane, layer) = self.kind.place(plane, layer)?;
        let Inside { arena, .. } = self.inside(py)?;
        let strides = *arena.strides();
        let start = arena.row(At { plane, layer, block: 0, token: 0, head: 0 });
        let outer = [
            (self.blocks_max as usize, strides.block),
            (self.kind.shape.block_tokens as usize, strides.token),
            (self.kind.shape.heads(), strides.head),
        ];
        let address = start.as_ptr().expose_provenance();
        // SAFETY: every row of the layer, in memory that stays as long as the arena.
        Bound::new(py, unsafe { Rows::new(Keeper::Arena(arena), &self.kind, address, &outer) })
    }

    // ----------------------------------------------------------------------------------------------------- store

    /// Full blocks of a sequence that stay until the result is released: to be saved by any thread.
    fn hold(&self, py: Python<'_>, sequence: u64) -> PyResult<Held> {
        self.call(py, |cache| cache.hold(id(sequence))).map(Held::new)
    }

    /// Saves all full blocks of a sequence that the store is not known to have. Whether it has all of them now. The cache
    /// can be used by others meanwhile.
    ///
    /// ``namespace`` is a ``moontide.kv.Namespace``, which says all that gives a block's bytes a meaning, or its prefix;
    /// see ``namespace_of``. ``part`` is what this process has of a block, if several share a model.
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
        let mut held = self.call(py, |cache| cache.hold(id(sequence)))?;
        py.detach(|| held.save(&store)).map_err(|error| errors::store(py, &error))
    }

    /// Brings what the store has of a sequence's beginning that is not there yet: how many tokens came. The last token is
    /// left to be computed. The cache waits meanwhile; ``fill(...).restore(...)`` does the same without.
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
        restored.map_err(|error| errors::park(py, &error))
    }

    /// Puts a sequence aside: its blocks go to the store, the last one even if it is not full, and their room is free.
    /// ``resume`` brings it back, here or in another process. The cache waits meanwhile.
    #[pyo3(signature = (sequence, store, namespace, *, part="0", options=None))]
    fn park(
        &self,
        py: Python<'_>,
        sequence: u64,
        store: &Bound<'_, Store>,
        namespace: &Bound<'_, PyAny>,
        part: &str,
        options: Option<&Bound<'_, PutOptions>>,
    ) -> PyResult<Parked> {
        let store = block_store(py, store, namespace, part, options)?;
        let parked = self.call_long(py, |cache| cache.park(id(sequence), &store))?;
        parked.map(Parked).map_err(|error| errors::park(py, &error))
    }

    /// Brings back a sequence that was put aside. All its tokens are there again; how many of them are complete is to be
    /// asked with ``filled``: what neither cache nor store has any more is to be computed again. The cache waits meanwhile.
    #[pyo3(signature = (parked, store, namespace, *, part="0"))]
    fn resume(
        &self,
        py: Python<'_>,
        parked: &Bound<'_, Parked>,
        store: &Bound<'_, Store>,
        namespace: &Bound<'_, PyAny>,
        part: &str,
    ) -> PyResult<u64> {
        let store = block_store(py, store, namespace, part, None)?;
        let parked = &parked.get().0;
        let resumed = self.call_long(py, |cache| cache.resume(parked, &store))?;
        Ok(resumed.map_err(|error| errors::park(py, &error))?.to_bits())
    }

    // -------------------------------------------------------------------------------------------------- thinning

    /// Adds to what the tokens of a sequence are worth, from the first on: for example the attention that each has got.
    fn add_worth(&self, py: Python<'_>, sequence: u64, worth: Vec<f32>) -> PyResult<()> {
        self.call(py, |cache| cache.add_worth(id(sequence), &worth))
    }

    /// Drops tokens from the middle of a sequence: so many from the first and up to the last stay, and of the others those
    /// that are worth most, ``budget`` in all. Gives the positions at which those that are left stood.
    #[pyo3(signature = (sequence, *, first, last, budget))]
    fn thin(
        &self,
        py: Python<'_>,
        sequence: u64,
        first: usize,
        last: usize,
        budget: usize,
    ) -> PyResult<Vec<u32>> {
        let thinned = self.call_long(py, |cache| cache.thin(id(sequence), &Keep { first, last, budget }))?;
        thinned.map_err(|error| errors::blocks(py, &error))
    }

    /// Where each token of a sequence stands: what its rotation was computed with.
    fn positions(&self, py: Python<'_>, sequence: u64) -> PyResult<Vec<u32>> {
        self.call(py, |cache| cache.positions(id(sequence)))
    }

    // ----------------------------------------------------------------------------------------------------- whole

    /// From now on there are so many blocks. With fewer than are in use it raises NoBlocks, and nothing has changed.
    fn resize(&self, py: Python<'_>, blocks: u32) -> PyResult<()> {
        if blocks > self.blocks_max {
            let max = self.blocks_max;
            return Err(errors::argument(format!(
                "{blocks} blocks are more than blocks_max, which is {max}"
            )));
        }
        let resized = self.call_long(py, |cache| cache.resize(blocks))?;
        resized.map_err(|error| errors::blocks(py, &error))
    }

    /// Forgets what is cached and in nobody's use.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |cache| {
            cache.clear();
            Ok(())
        })
    }

    /// Numbers about it: ``held + cached + waiting + reserved + free == blocks``, unless it is shrinking; and what has
    /// happened since it was made.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (stats, shrinking) = self.call(py, |cache| Ok((cache.stats(), cache.is_shrinking())))?;
        let out = PyDict::new(py);
        let counts = stats.counts;
        let numbers = [
            ("blocks", u64::from(stats.blocks)),
            ("free", u64::from(stats.free)),
            ("held", u64::from(stats.held)),
            ("shared", u64::from(stats.shared)),
            ("cached", u64::from(stats.cached)),
            ("waiting", u64::from(stats.waiting)),
            ("reserved", u64::from(stats.reserved)),
            ("block_bytes", stats.block_bytes as u64),
            ("sequences", u64::from(stats.sequences)),
            ("tokens", stats.tokens),
            ("prompt_tokens", counts.prompt_tokens),
            ("shared_tokens", counts.shared_tokens),
            ("restored_tokens", counts.restored_tokens),
            ("forks", counts.forks),
            ("parked", counts.parked),
            ("copied_blocks", counts.copied_blocks),
            ("moved_blocks", counts.moved_blocks),
            ("evicted_blocks", counts.evicted_blocks),
            ("dropped_tokens", counts.dropped_tokens),
        ];
        for (name, number) in numbers {
            out.set_item(name, number)?;
        }
        out.set_item("fragmentation", stats.fragmentation)?;
        out.set_item("shrinking", shrinking)?;
        Ok(out)
    }

    /// A page about all sequences, for people.
    fn dump(&self, py: Python<'_>) -> PyResult<String> {
        self.call(py, |cache| Ok(cache.dump()))
    }

    /// A map of all blocks, one letter each, for people.
    fn block_map(&self, py: Python<'_>) -> PyResult<String> {
        self.call(py, |cache| Ok(cache.block_map()))
    }

    fn __repr__(&self) -> String {
        format!("<moontide.blocks.BlockCache of {}>", self.kind.shape)
    }
}

/// Places for sequences cost memory each, and no engine runs more at a time.
const SEQUENCES_MAX: u32 = 1 << 20;

//! [`Store`]: the blocking client.

use bytes::Bytes;
use moontide_client::{GetInto, ObjectRef, PutItem, PutOutcome, StoreConfig, StoreError};
use moontide_settings::{Origin, process_environment};
use moontide_types::tensor::{TENSOR_HEADER_BYTES, TensorHeader};
use moontide_types::{NodeId, SegmentId};
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::addresses;
use crate::arguments::{Keys, PutOptions, key, pin_class, put_options, same_length, set_named};
use crate::array::{Array, Source, Target};
use crate::errors;
use crate::invalidations::Invalidations;
use crate::operators;
use crate::process::{ProcessLocal, unusable_error};
use crate::tensor::{Tensor, header_of, no_tensor};
use crate::view::View;

/// Local copies up to this length hold the GIL: they take less time than reacquiring it.
pub(crate) const COPY_WITH_GIL_MAX: usize = 64 << 10;

/// Connection to a cluster. One per process is enough: threads share it, and calls release the GIL while they wait.
///
/// >>> store = moontide.Store(dev.master)
/// >>> store.put("prefix-0001", b"keys and values")
/// True
/// >>> store.get("prefix-0001")
/// b'keys and values'
/// >>> store.get("never put") is None
/// True
///
/// A store belongs to the process that created it. A forked child must open its own connection.
#[pyclass(module = "moontide._native", subclass, frozen)]
#[derive(Debug)]
pub(crate) struct Store {
    held: ProcessLocal<moontide_client::Store>,
    master: String,
}

/// Returns the settings of a store: the arguments, else the environment, else the defaults. The command line uses the
/// same names and the same order.
pub(crate) fn config(master: Option<&str>, settings: Option<&Bound<'_, PyDict>>) -> PyResult<StoreConfig> {
    let loaded = moontide_settings::load(StoreConfig::default(), None, process_environment(), []);
    let mut loaded = loaded.map_err(errors::argument)?;
    if let Some(master) = master {
        loaded.set("master", master, Origin::Argument("master".to_owned())).map_err(errors::argument)?;
    }
    set_named(&mut loaded, settings)?;
    Ok(loaded.config)
}

impl Store {
    /// Returns the Rust client.
    pub(crate) fn client(&self, py: Python<'_>) -> PyResult<moontide_client::Store> {
        self.held.with(Clone::clone).map_err(|reason| unusable_error(py, "store", reason))
    }

    /// Runs a call with the GIL released.
    fn call<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&moontide_client::Store) -> Result<R, StoreError> + Send,
    ) -> PyResult<R> {
        let client = self.client(py)?;
        py.detach(|| call(&client)).map_err(|error| errors::store(py, &error))
    }

    /// Gets an object: zero-copy if a local node has it, otherwise as a copy.
    fn object(&self, py: Python<'_>, key: &[u8]) -> PyResult<Option<ObjectRef>> {
        let client = self.client(py)?;
        // Keeps the GIL: other Python threads could hold it for milliseconds after a release.
        match client.try_get_ref(key).map_err(|error| errors::store(py, &error))? {
            Some(object) => Ok(Some(object)),
            None => py.detach(|| client.get_ref(key)).map_err(|error| errors::store(py, &error)),
        }
    }
}

/// Copies a local object and verifies it. Returns `false` if the bytes do not match their digest.
pub(crate) fn copy_out(
    py: Python<'_>,
    client: &moontide_client::Store,
    object: &ObjectRef,
    into: &mut [u8],
) -> bool {
    match into.len() {
        ..=COPY_WITH_GIL_MAX => client.copy_out(object, into),
        _ => py.detach(|| client.copy_out(object, into)),
    }
}

/// Whether a put stored the object.
pub(crate) fn was_stored(outcome: PutOutcome) -> bool {
    matches!(outcome, PutOutcome::Stored)
}

/// A `bytes` object whose content is not initialized yet. No other code has a reference to it.
pub(crate) struct UninitBytes(Py<PyBytes>);

impl UninitBytes {
    pub(crate) fn new(py: Python<'_>, len: usize) -> PyResult<UninitBytes> {
        // SAFETY: without content, Python creates an object with uninitialized bytes.
        let made = unsafe {
            let object = ffi::PyBytes_FromStringAndSize(std::ptr::null(), len as isize);
            Bound::from_owned_ptr_or_err(py, object)?
        };
        Ok(UninitBytes(made.cast_into::<PyBytes>()?.unbind()))
    }

    /// Returns the bytes. The caller writes them before it reads them.
    pub(crate) fn content(&mut self, py: Python<'_>) -> &mut [u8] {
        let bytes = self.0.bind(py).as_bytes();
        // SAFETY: this value has the only reference to the object until `filled`, and bytes may have any value.
        unsafe { std::slice::from_raw_parts_mut(bytes.as_ptr().cast_mut(), bytes.len()) }
    }

    /// Returns a copy of `bytes`.
    pub(crate) fn copy<'py>(py: Python<'py>, bytes: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        let mut made = UninitBytes::new(py, bytes.len())?;
        made.content(py).copy_from_slice(bytes);
        Ok(made.filled().into_bound(py))
    }

    pub(crate) fn filled(self) -> Py<PyBytes> {
        self.0
    }
}

/// Gets an object as `bytes`, with one copy, directly into the new object. Called with the GIL released.
fn get_bytes(client: &moontide_client::Store, key: &[u8]) -> Result<Option<Py<PyBytes>>, StoreError> {
    let mut made: Option<UninitBytes> = None;
    let mut no_memory: Vec<u8> = Vec::new();
    let mut make = |len: usize| -> &mut [u8] {
        let content = Python::attach(|py| {
            made = UninitBytes::new(py, len).ok();
            made.as_mut().map(|made| {
                let content = made.content(py);
                (content.as_mut_ptr(), content.len())
            })
        });
        match content {
            // SAFETY: `made` holds the object until it is returned or replaced, and the previous object is not used any
            // more when this closure is called again.
            Some((start, len)) => unsafe { std::slice::from_raw_parts_mut(start, len) },
            None => {
                // Python cannot allocate: read into other memory, and fail afterwards.
                no_memory = vec![0; len];
                // SAFETY: as above.
                unsafe { std::slice::from_raw_parts_mut(no_memory.as_mut_ptr(), len) }
            }
        }
    };
    let len = client.get_with(key, &mut make)?;
    match (len, made) {
        (None, _) => Ok(None),
        (Some(_), Some(made)) => Ok(Some(made.filled())),
        (Some(_), None) => Err(StoreError::System {
            what: "allocate memory for the object's bytes",
            reason: "out of memory".into(),
        }),
    }
}

#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (master=None, **settings))]
    fn new(py: Python<'_>, master: Option<&str>, settings: Option<&Bound<'_, PyDict>>) -> PyResult<Store> {
        let config = config(master, settings)?;
        let master = config.master.clone();
        let connected = py.detach(|| moontide_client::Store::connect(config));
        let held = ProcessLocal::new(connected.map_err(|error| errors::store(py, &error))?);
        Ok(Store { held, master })
    }

    /// Address of the master.
    #[getter]
    fn master(&self) -> &str {
        &self.master
    }

    /// Closes the connection after the running calls. Views remain valid. Further calls of close() do nothing.
    fn close(&self, py: Python<'_>) {
        if let Some(client) = self.held.take() {
            py.detach(|| drop(client));
        }
    }

    /// Whether the store is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.held.with(|_| ()).is_err()
    }

    // ------------------------------------------------------------------------------------------------------- put

    /// Stores bytes, a buffer or an array under a key. Returns False if the key exists; the object is then unchanged.
    ///
    /// A non-contiguous array is copied first; all other memory is sent without a copy. Options are a PutOptions, or
    /// its fields as keywords.
    ///
    /// >>> store.put("k1", b"one"), store.put("k1", b"two")
    /// (True, False)
    /// >>> store.put("k1", b"two", overwrite=True)
    /// True
    #[pyo3(signature = (key, value, options=None, **named))]
    fn put(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PutOptions>>,
        named: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<bool> {
        let options = put_options(py, options, named)?;
        let (key, source) = (self::key(key)?, Source::of(value)?);
        let parts = [source.bytes()];
        self.call(py, |client| client.put_with(key, &parts, &options)).map(was_stored)
    }

    /// Stores the bytes of several buffers, in order, as one object.
    ///
    /// >>> store.put_from("gathered", [b"keys", b"values"])
    /// True
    /// >>> store.get("gathered")
    /// b'keysvalues'
    #[pyo3(signature = (key, parts, options=None, **named))]
    fn put_from(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        parts: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PutOptions>>,
        named: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<bool> {
        let options = put_options(py, options, named)?;
        let sources: Vec<Source> =
            parts.try_iter()?.map(|part| Source::of(&part?)).collect::<PyResult<_>>()?;
        let key = self::key(key)?;
        let parts: Vec<&[u8]> = sources.iter().map(Source::bytes).collect();
        self.call(py, |client| client.put_with(key, &parts, &options)).map(was_stored)
    }

    /// Stores many objects. Returns for each whether it was stored. Raises BatchError, with all outcomes, if any
    /// failed.
    ///
    /// >>> store.batch_put(["b1", "b2"], [b"one", b"two"])
    /// [True, True]
    #[pyo3(signature = (keys, values, options=None, **named))]
    fn batch_put<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        values: &Bound<'py, PyAny>,
        options: Option<&Bound<'_, PutOptions>>,
        named: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let options = put_options(py, options, named)?;
        let keys = Keys::of(keys)?;
        let sources: Vec<Source> =
            values.try_iter()?.map(|value| Source::of(&value?)).collect::<PyResult<_>>()?;
        same_length(keys.len(), sources.len(), "values")?;
        let parts: Vec<[&[u8]; 1]> = sources.iter().map(|source| [source.bytes()]).collect();
        let keys = keys.bytes()?;
        let items: Vec<PutItem<'_>> =
            keys.iter().zip(&parts).map(|(key, parts)| PutItem { key, parts }).collect();
        let outcomes = self.call(py, |client| Ok(client.put_batch(&items, &options)))?;
        errors::batch(py, outcomes.into_iter().map(|outcome| outcome.map(was_stored)).collect())
    }

    /// Stores an array with its type and shape. ``get_tensor`` returns the same array.
    #[pyo3(signature = (key, array, options=None, **named))]
    fn put_tensor(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        array: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PutOptions>>,
        named: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<bool> {
        let options = put_options(py, options, named)?;
        let (key, (header, source)) = (self::key(key)?, tensor_parts(py, array)?);
        let parts = [&header[..], source.bytes()];
        self.call(py, |client| client.put_with(key, &parts, &options)).map(was_stored)
    }

    // ------------------------------------------------------------------------------------------------------- get

    /// Returns a copy of an object as bytes, or None if the key does not exist.
    fn get<'py>(&self, py: Python<'py>, key: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let (client, key) = (self.client(py)?, self::key(key)?);
        let local = client.try_get_ref(key).map_err(|error| errors::store(py, &error))?;
        if let Some(object) = local {
            let mut made = UninitBytes::new(py, object.len())?;
            if copy_out(py, &client, &object, made.content(py)) {
                return Ok(Some(made.filled().into_bound(py)));
            }
        }
        let bytes = py.detach(|| get_bytes(&client, key)).map_err(|error| errors::store(py, &error))?;
        Ok(bytes.map(|bytes| bytes.into_bound(py)))
    }

    /// Returns a View of an object, zero-copy if a local node has it, or None if the key does not exist.
    fn get_view(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<Option<View>> {
        Ok(self.object(py, self::key(key)?)?.map(View::new))
    }

    /// Returns a tensor that ``put_tensor`` stored, zero-copy if a local node has it, or None if the key does not
    /// exist.
    fn get_tensor(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<Option<Tensor>> {
        Tensor::of(py, self.object(py, self::key(key)?)?)
    }

    /// Returns a Tensor for an object that was put as a tensor, otherwise a View; None if the key does not exist.
    fn _get_value<'py>(
        &self,
        py: Python<'py>,
        key: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(object) = self.object(py, self::key(key)?)? else { return Ok(None) };
        Ok(Some(match header_of(&object) {
            Ok(header) => Bound::new(py, Tensor::new(object, header))?.into_any(),
            Err(_) => Bound::new(py, View::new(object))?.into_any(),
        }))
    }

    /// Copies an object into writable memory, or into a list of buffers in order. Returns its length, or None if the
    /// key does not exist. Bytes of the memory behind the end of the object are unchanged.
    ///
    /// >>> _ = store.put("k2", b"0123456789")
    /// >>> space = bytearray(16)
    /// >>> store.get_into("k2", space)
    /// 10
    /// >>> halves = [bytearray(5), bytearray(5)]
    /// >>> store.get_into("k2", halves), bytes(halves[1])
    /// (10, b'56789')
    fn get_into(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        into: &Bound<'_, PyAny>,
    ) -> PyResult<Option<usize>> {
        let (client, key) = (self.client(py)?, self::key(key)?);
        let mut targets = targets(into)?;
        let local = client.try_get_ref(key).map_err(|error| errors::store(py, &error))?;
        if let Some(object) = local
            && let [target] = &mut targets[..]
            && let Some(space) = target.bytes().get_mut(..object.len())
            && copy_out(py, &client, &object, space)
        {
            return Ok(Some(object.len()));
        }
        let mut spaces: Vec<&mut [u8]> = targets.iter_mut().map(Target::bytes).collect();
        py.detach(|| get_into_parts(&client, key, &mut spaces)).map_err(|error| errors::store(py, &error))
    }

    /// Returns copies of many objects; None for each key that does not exist. Raises BatchError if any failed.
    fn batch_get<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let keys = Keys::of(keys)?;
        let keys = keys.bytes()?;
        let outcomes = self.call(py, |client| Ok(client.get_batch(&keys)))?;
        batch_bytes(py, outcomes)
    }

    /// Copies many objects, each into its own buffer or list of buffers. Returns their lengths; None for each key that
    /// does not exist. Raises BatchError if any failed.
    fn batch_get_into<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        into: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let keys = Keys::of(keys)?;
        let mut all: Vec<Vec<Target>> =
            into.try_iter()?.map(|into| targets(&into?)).collect::<PyResult<_>>()?;
        same_length(keys.len(), all.len(), "buffers")?;
        let keys = keys.bytes()?;
        let mut spaces: Vec<Vec<&mut [u8]>> =
            all.iter_mut().map(|targets| targets.iter_mut().map(Target::bytes).collect()).collect();
        let outcomes = self.call(py, |client| Ok(get_batch_into_parts(client, &keys, &mut spaces)))?;
        errors::batch(py, outcomes)
    }

    /// Returns many objects as ``get_view`` does. Raises BatchError if any failed.
    fn batch_get_view<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let keys = Keys::of(keys)?;
        let keys = keys.bytes()?;
        let outcomes = self.call(py, |client| Ok(get_refs(client, &keys)))?;
        errors::batch(py, outcomes.into_iter().map(|outcome| Ok(outcome?.map(View::new))).collect())
    }

    // ------------------------------------------------------------------------------------------------ other calls

    /// Whether a key exists.
    fn exists(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<bool> {
        let key = self::key(key)?;
        self.call(py, |client| client.exists(key))
    }

    /// Returns for each key whether it exists. Raises BatchError if any failed.
    fn batch_exists<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let keys = Keys::of(keys)?;
        let keys = keys.bytes()?;
        let found = self.call(py, |client| Ok(client.exists_batch(&keys)))?;
        errors::batch(py, found)
    }

    /// Returns the id that invalidations() reports for a key: 16 bytes. It changes with remove_all(force=True).
    fn object_id<'py>(&self, py: Python<'py>, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
        let id = self.client(py)?.object_id(self::key(key)?).map_err(|error| errors::store(py, &error))?;
        Ok(PyBytes::new(py, &id.0))
    }

    /// Follows removals, evictions, expiry and losses of objects from now on.
    fn invalidations(&self, py: Python<'_>) -> PyResult<Invalidations> {
        Ok(Invalidations::new(self.client(py)?.invalidations()))
    }

    /// Removes an object. Returns whether it existed. With force, also removes a leased or pinned object.
    #[pyo3(signature = (key, force=false))]
    fn remove(&self, py: Python<'_>, key: &Bound<'_, PyAny>, force: bool) -> PyResult<bool> {
        let key = self::key(key)?;
        self.call(py, |client| client.remove(key, force))
    }

    /// Removes many objects. Returns for each whether it existed. Raises BatchError if any failed.
    #[pyo3(signature = (keys, force=false))]
    fn batch_remove<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        force: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let keys = Keys::of(keys)?;
        let keys = keys.bytes()?;
        let outcomes = self.call(py, |client| Ok(client.remove_batch(&keys, force)))?;
        errors::batch(py, outcomes)
    }

    /// Removes all objects of the tenant. Returns their number.
    #[pyo3(signature = (force=false))]
    fn remove_all(&self, py: Python<'_>, force: bool) -> PyResult<u64> {
        self.call(py, |client| Ok(client.remove_all(force)?.removed))
    }

    /// Removes all objects whose keys have a prefix. Returns their number. Leased and pinned objects are kept unless
    /// `force` is set.
    #[pyo3(signature = (prefix, force=false))]
    fn remove_by_prefix(&self, py: Python<'_>, prefix: &Bound<'_, PyAny>, force: bool) -> PyResult<u64> {
        let prefix = self::key(prefix)?;
        self.call(py, |client| Ok(client.remove_by_prefix(prefix, force)?.removed))
    }

    /// Removes all objects whose keys match a regular expression, in the syntax of the Rust crate `regex`. Returns their
    /// number.
    #[pyo3(signature = (pattern, force=false))]
    fn remove_by_regex(&self, py: Python<'_>, pattern: &str, force: bool) -> PyResult<u64> {
        self.call(py, |client| Ok(client.remove_by_regex(pattern, force)?.removed))
    }

    /// Marks an object as used, which delays its eviction. Returns whether it exists.
    fn touch(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<bool> {
        let key = self::key(key)?;
        self.call(py, |client| client.touch(&[key]).pop().expect("one result per key"))
    }

    /// Marks many objects as used. Returns for each whether it exists. Raises BatchError if any failed.
    fn batch_touch<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let keys = Keys::of(keys)?;
        let keys = keys.bytes()?;
        let found = self.call(py, |client| Ok(client.touch(&keys)))?;
        errors::batch(py, found)
    }

    /// Changes how an object resists eviction: "none", "soft" (evicted last) or "hard" (never). Returns whether it exists.
    ///
    /// >>> _ = store.put("prompt", b"system")
    /// >>> store.set_pin("prompt", "hard"), store.stat("prompt")["pin"]
    /// (True, 'hard')
    fn set_pin(&self, py: Python<'_>, key: &Bound<'_, PyAny>, pin: &str) -> PyResult<bool> {
        let (key, pin) = (self::key(key)?, pin_class(pin)?);
        self.call(py, |client| client.set_pin(&[key], pin).pop().expect("one result per key"))
    }

    /// As set_pin, for many objects. Raises BatchError if any failed.
    fn batch_set_pin<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        pin: &str,
    ) -> PyResult<Bound<'py, PyList>> {
        let (keys, pin) = (Keys::of(keys)?, pin_class(pin)?);
        let keys = keys.bytes()?;
        let found = self.call(py, |client| Ok(client.set_pin(&keys, pin)))?;
        errors::batch(py, found)
    }

    /// Promotes objects from disk to memory. Returns for each whether it exists. Raises BatchError if any failed.
    fn prefetch<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let keys = Keys::of(keys)?;
        let keys = keys.bytes()?;
        let found = self.call(py, |client| Ok(client.prefetch(&keys)))?;
        errors::batch(py, found)
    }

    /// Returns the keys with a prefix, as bytes, unordered.
    ///
    /// >>> _ = store.batch_put(["doc/1", "doc/2"], [b"", b""])
    /// >>> sorted(store.keys("doc/"))
    /// [b'doc/1', b'doc/2']
    #[pyo3(signature = (prefix=None))]
    fn keys<'py>(
        &self,
        py: Python<'py>,
        prefix: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        const PAGE: u32 = 1024;
        let prefix = prefix.map(self::key).transpose()?.unwrap_or_default();
        let mut all = Vec::new();
        let mut cursor = Vec::new();
        loop {
            let page = self.call(py, |client| client.list(prefix, &cursor, PAGE))?;
            all.extend(page.keys.iter().map(|key| PyBytes::new(py, key)));
            if page.next.is_empty() {
                return Ok(all);
            }
            cursor = page.next;
            py.check_signals()?;
        }
    }

    /// Returns the metadata of an object as a dict, or None if the key does not exist.
    fn stat<'py>(&self, py: Python<'py>, key: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let key = self::key(key)?;
        let info = self.call(py, |client| client.stat(key))?;
        info.map(|info| operators::object_dict(py, &info)).transpose()
    }

    /// As stat, for many objects. Raises BatchError if any failed.
    fn batch_stat<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let keys = Keys::of(keys)?;
        let keys = keys.bytes()?;
        let infos = self.call(py, |client| Ok(client.stat_batch(&keys)))?;
        let mut dicts = Vec::with_capacity(infos.len());
        for info in infos {
            dicts.push(match info {
                Ok(info) => Ok(info.map(|info| operators::object_dict(py, &info)).transpose()?),
                Err(error) => Err(error),
            });
        }
        errors::batch(py, dicts)
    }

    /// Returns the tenants with quota and usage, one dict per tenant.
    fn tenants<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let tenants = self.call(py, moontide_client::Store::tenants)?;
        tenants.iter().map(|tenant| operators::tenant_dict(py, tenant)).collect()
    }

    /// Sets the quota of a tenant, which need not be the one of this store: bytes in memory, and objects; 0 is no limit.
    #[pyo3(signature = (tenant, bytes_max=0, objects_max=0))]
    fn set_tenant_quota(
        &self,
        py: Python<'_>,
        tenant: &str,
        bytes_max: u64,
        objects_max: u64,
    ) -> PyResult<()> {
        self.call(py, |client| client.set_tenant_quota(tenant, bytes_max, objects_max))
    }

    /// Evicts objects until at most this share of the memory is used: 0.0 to 1.0. Returns a dict with the number of objects
    /// that leave memory, and their bytes. With a disk tier they move to disk in the background.
    fn evict<'py>(&self, py: Python<'py>, usage: f64) -> PyResult<Bound<'py, PyDict>> {
        let target = operators::permille(usage)?;
        let evicted = self.call(py, |client| client.evict(target))?;
        let dict = PyDict::new(py);
        dict.set_item("objects", evicted.objects)?;
        dict.set_item("bytes", evicted.bytes)?;
        Ok(dict)
    }

    /// Returns the segments of all nodes, or of one, one dict per segment.
    #[pyo3(signature = (node=None))]
    fn segments<'py>(&self, py: Python<'py>, node: Option<&str>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let node = node.map(node_of).transpose()?;
        let segments = self.call(py, |client| client.segments(node))?;
        segments.iter().map(|segment| operators::segment_dict(py, segment)).collect()
    }

    /// Starts the drain of one segment: it gets no new objects, and those in it move to other segments, or with `evict` are
    /// evicted unless they are in use. segments() tells how far it is.
    #[pyo3(signature = (node, segment, evict=false))]
    fn drain_segment(&self, py: Python<'_>, node: &str, segment: u32, evict: bool) -> PyResult<()> {
        let node = node_of(node)?;
        self.call(py, |client| client.drain_segment(node, SegmentId(segment), evict))
    }

    /// Returns the registered nodes, one dict per node.
    fn nodes<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let nodes = self.call(py, |client| client.nodes())?;
        let each = nodes.into_iter().map(|node| {
            let dict = PyDict::new(py);
            dict.set_item("node", node_name(node.node))?;
            let addresses =
                node.addresses.iter().map(|(engine, address)| (engine.to_string(), address.to_string()));
            dict.set_item("addresses", addresses.collect::<Vec<_>>())?;
            dict.set_item("host", node.host.to_string())?;
            dict.set_item("rack", node.rack.to_string())?;
            dict.set_item("zone", node.zone.to_string())?;
            dict.set_item("draining", node.draining)?;
            Ok(dict)
        });
        each.collect()
    }

    /// Starts the drain of a node: it gets no new objects, and those in its memory move to other nodes. Returns when the
    /// masters have accepted it; drain_progress() tells how far it is.
    fn drain_node(&self, py: Python<'_>, node: &str) -> PyResult<()> {
        let node = node_of(node)?;
        self.call(py, |client| client.drain_node(node))
    }

    /// Ends the drain of a node: it gets new objects again.
    fn undrain_node(&self, py: Python<'_>, node: &str) -> PyResult<()> {
        let node = node_of(node)?;
        self.call(py, |client| client.undrain_node(node))
    }

    /// Returns the state of a node that is drained, as a dict: whether it is empty, the bytes of its objects, its
    /// segments, and those that accept no new objects.
    fn drain_progress<'py>(&self, py: Python<'py>, node: &str) -> PyResult<Bound<'py, PyDict>> {
        let node = node_of(node)?;
        let progress = self.call(py, |client| client.drain_progress(node))?;
        let dict = PyDict::new(py);
        dict.set_item("empty", progress.is_empty())?;
        dict.set_item("bytes_left", progress.bytes_left)?;
        dict.set_item("segments", progress.segments)?;
        dict.set_item("segments_draining", progress.segments_draining)?;
        Ok(dict)
    }

    /// For moontide.compat and moontide.kv: puts from addresses.
    #[pyo3(signature = (keys, addresses, sizes, options=None))]
    fn _put_addresses(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        addresses: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PutOptions>>,
    ) -> PyResult<Vec<i64>> {
        addresses::put(self, py, keys, addresses, sizes, options)
    }

    /// For moontide.compat and moontide.kv: gets to addresses.
    #[pyo3(signature = (keys, addresses, sizes, exact=false))]
    fn _get_addresses(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        addresses: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        exact: bool,
    ) -> PyResult<Vec<i64>> {
        addresses::get(self, py, keys, addresses, sizes, exact)
    }

    /// For moontide.compat and moontide.kv: which keys exist, as codes.
    fn _exists_codes(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
        addresses::exist(self, py, keys)
    }

    /// Returns the counters of this store by name.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats_of(py, &self.client(py)?)
    }
}

/// Parses a node id in the format of the command line.
fn node_of(name: &str) -> PyResult<NodeId> {
    name.parse().map_err(|error: moontide_types::InvalidNodeId| {
        pyo3::exceptions::PyValueError::new_err(error.to_string())
    })
}

/// Returns a node id in the format of the command line.
pub(crate) fn node_name(node: NodeId) -> String {
    node.to_string()
}

/// Returns the memory for one object: a buffer, or a list or tuple of buffers.
pub(crate) fn targets(into: &Bound<'_, PyAny>) -> PyResult<Vec<Target>> {
    if into.is_instance_of::<PyList>() || into.is_instance_of::<pyo3::types::PyTuple>() {
        return into.try_iter()?.map(|part| Target::of(&part?)).collect();
    }
    Ok(vec![Target::of(into)?])
}

/// Returns the copies of a batch as `bytes`.
pub(crate) fn batch_bytes(
    py: Python<'_>,
    outcomes: Vec<Result<Option<Bytes>, StoreError>>,
) -> PyResult<Bound<'_, PyList>> {
    let mut all = Vec::with_capacity(outcomes.len());
    for outcome in outcomes {
        all.push(match outcome {
            Ok(Some(bytes)) => Ok(Some(UninitBytes::copy(py, &bytes)?)),
            Ok(None) => Ok(None),
            Err(error) => Err(error),
        });
    }
    errors::batch(py, all)
}

/// Gets many objects; local ones zero-copy.
pub(crate) fn get_refs(
    client: &moontide_client::Store,
    keys: &[&[u8]],
) -> Vec<Result<Option<ObjectRef>, StoreError>> {
    let local: Vec<_> = keys.iter().map(|key| client.try_get_ref(key)).collect();
    let remote = keys.iter().zip(&local).filter(|(_, local)| matches!(local, Ok(None))).map(|(key, _)| *key);
    let mut fetched = client.get_batch(&remote.collect::<Vec<_>>()).into_iter();
    let all = local.into_iter().map(|local| match local {
        Ok(None) => {
            let fetched = fetched.next().expect("one result per remote key");
            fetched.map(|bytes| bytes.map(ObjectRef::from))
        }
        local => local,
    });
    all.collect()
}

/// Returns the tensor header of an array, and its bytes.
pub(crate) fn tensor_parts(
    py: Python<'_>,
    array: &Bound<'_, PyAny>,
) -> PyResult<([u8; TENSOR_HEADER_BYTES], Source)> {
    let array = Array::of(array)?;
    let dtype = array.dtype.ok_or_else(|| {
        PyTypeError::new_err(
            "element type is not supported for tensors; put the bytes, or view the array as another type",
        )
    })?;
    let header = TensorHeader::new(dtype, &array.shape()).map_err(|error| no_tensor(py, error))?;
    Ok((header.encode(), array.into_source(py)?))
}

/// Returns the counters of a store by name.
pub(crate) fn stats_of<'py>(
    py: Python<'py>,
    client: &moontide_client::Store,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, value) in client.metrics().stats().by_name() {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}

/// Copies an object into several buffers, in order.
pub(crate) fn get_into_parts(
    client: &moontide_client::Store,
    key: &[u8],
    spaces: &mut [&mut [u8]],
) -> Result<Option<usize>, StoreError> {
    match spaces {
        [space] => client.get_into(key, space),
        spaces => {
            if let Some(object) = client.try_get_ref(key)? {
                let mut spaces = truncate(spaces, object.len())?;
                if client.copy_out_parts(&object, &mut spaces) {
                    return Ok(Some(object.len()));
                }
            }
            let Some(object) = client.get(key)? else { return Ok(None) };
            scatter(client, &object.into(), spaces).map(Some)
        }
    }
}

/// Copies many objects, each into several buffers in order.
pub(crate) fn get_batch_into_parts(
    client: &moontide_client::Store,
    keys: &[&[u8]],
    spaces: &mut [Vec<&mut [u8]>],
) -> Vec<Result<Option<usize>, StoreError>> {
    if spaces.iter().all(|spaces| spaces.len() == 1) {
        let each = keys.iter().zip(spaces).map(|(key, spaces)| GetInto { key, into: &mut *spaces[0] });
        return client.get_batch_into(&mut each.collect::<Vec<_>>());
    }
    // Local objects are copied zero-copy; all others are fetched in one batch.
    let mut results: Vec<Option<Result<Option<usize>, StoreError>>> = Vec::with_capacity(keys.len());
    for (key, spaces) in keys.iter().zip(spaces.iter_mut()) {
        results.push(match client.try_get_ref(key) {
            Ok(Some(object)) => match truncate(spaces, object.len()) {
                Ok(mut spaces) => {
                    client.copy_out_parts(&object, &mut spaces).then_some(Ok(Some(object.len())))
                }
                Err(error) => Some(Err(error)),
            },
            Ok(None) => None,
            Err(error) => Some(Err(error)),
        });
    }
    let remote: Vec<usize> = (0..keys.len()).filter(|&at| results[at].is_none()).collect();
    let objects = client.get_batch(&remote.iter().map(|&at| keys[at]).collect::<Vec<_>>());
    for (at, object) in remote.into_iter().zip(objects) {
        results[at] = Some(object.and_then(|object| {
            object.map(|object| scatter(client, &object.into(), &mut spaces[at])).transpose()
        }));
    }
    results.into_iter().map(|result| result.expect("every key is local or remote")).collect()
}

/// Returns the first `len` bytes of several buffers.
fn truncate<'a>(spaces: &'a mut [&mut [u8]], len: usize) -> Result<Vec<&'a mut [u8]>, StoreError> {
    let capacity = spaces.iter().map(|space| space.len()).sum();
    if len > capacity {
        return Err(StoreError::BufferTooSmall { len: len as u64, room: capacity });
    }
    let mut left = len;
    let each = spaces.iter_mut().map(|space| {
        let part = left.min(space.len());
        left -= part;
        &mut space[..part]
    });
    Ok(each.collect())
}

/// Copies an object that is already a copy into several buffers.
fn scatter(
    client: &moontide_client::Store,
    object: &ObjectRef,
    spaces: &mut [&mut [u8]],
) -> Result<usize, StoreError> {
    client.copy_out_parts(object, &mut truncate(spaces, object.len())?);
    Ok(object.len())
}

//! [`Store`]: the calls of threads.

use bytes::Bytes;
use moontide_client::{GetInto, Hedge, ObjectRef, Put, PutItem, StoreConfig, StoreError};
use moontide_types::NodeId;
use moontide_types::tensor::{TENSOR_HEADER_BYTES, TensorHeader};
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::addresses;
use crate::arguments::{Keys, PutOptions, key, put_options, same_length, seconds};
use crate::array::{Array, Source, Target};
use crate::departures::Departures;
use crate::errors;
use crate::process::{OfProcess, gone};
use crate::tensor::{Tensor, header_of, no_tensor};
use crate::view::View;

/// Copies within this host up to this length are made with Python's lock held: they take less time than getting it back.
pub(crate) const COPY_HELD_MAX: usize = 64 << 10;

/// A connection to a cluster. One per process is enough: threads share it, and calls wait with Python's lock released.
///
/// >>> store = moontide.Store(dev.master)
/// >>> store.put("prefix-0001", b"keys and values")
/// True
/// >>> store.get("prefix-0001")
/// b'keys and values'
/// >>> store.get("never put") is None
/// True
///
/// It is made for the process that made it: a forked child has to connect anew.
#[pyclass(module = "moontide._native", subclass, frozen)]
#[derive(Debug)]
pub(crate) struct Store {
    held: OfProcess<moontide_client::Store>,
    master: String,
}

/// Where the master is: as the command line has it, named, in the environment, or where one is by default.
pub(crate) fn master_or_default(named: Option<&str>) -> String {
    let named = named.map(str::to_owned).or_else(|| std::env::var("MOONTIDE_MASTER").ok());
    named.unwrap_or_else(|| "127.0.0.1:7400".to_owned())
}

/// What a store is configured with, from keywords.
#[allow(clippy::too_many_arguments)] // keywords of a constructor
pub(crate) fn config(
    master: &str,
    tenant: &str,
    deadline: f64,
    connect: f64,
    local: bool,
    verify_local: bool,
    connections: usize,
    hedge: bool,
    locations: usize,
    rack: &str,
    zone: &str,
) -> PyResult<StoreConfig> {
    Ok(StoreConfig {
        tenant: tenant.to_owned(),
        deadline: seconds("deadline", deadline)?,
        connect: seconds("connect", connect)?,
        local,
        verify_local,
        connections,
        hedge: if hedge { Hedge::Adaptive } else { Hedge::Off },
        locations,
        rack: rack.to_owned(),
        zone: zone.to_owned(),
        ..StoreConfig::new(master)
    })
}

impl Store {
    /// The client behind it.
    pub(crate) fn client(&self, py: Python<'_>) -> PyResult<moontide_client::Store> {
        self.held.with(Clone::clone).map_err(|why| gone(py, "store", why))
    }

    /// Runs a call with Python's lock released.
    fn call<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&moontide_client::Store) -> Result<R, StoreError> + Send,
    ) -> PyResult<R> {
        let client = self.client(py)?;
        py.detach(|| call(&client)).map_err(|error| errors::store(py, &error))
    }

    /// An object in place, or a copy of one that is not here.
    fn object(&self, py: Python<'_>, key: &[u8]) -> PyResult<Option<ObjectRef>> {
        let client = self.client(py)?;
        // Without releasing the lock, which other threads of Python might then keep for milliseconds.
        match client.get_ref_here(key).map_err(|error| errors::store(py, &error))? {
            Some(object) => Ok(Some(object)),
            None => py.detach(|| client.get_ref(key)).map_err(|error| errors::store(py, &error)),
        }
    }
}

/// Copies an object that is here, verified; `false`: the bytes are not right.
pub(crate) fn copy_out(
    py: Python<'_>,
    client: &moontide_client::Store,
    object: &ObjectRef,
    into: &mut [u8],
) -> bool {
    match into.len() {
        ..=COPY_HELD_MAX => client.copy_out(object, into),
        _ => py.detach(|| client.copy_out(object, into)),
    }
}

/// Whether a put stored something.
pub(crate) fn was_stored(outcome: Put) -> bool {
    matches!(outcome, Put::Stored)
}

/// `bytes` whose content is filled in later. Nobody else has seen them yet.
pub(crate) struct Unfilled(Py<PyBytes>);

impl Unfilled {
    pub(crate) fn new(py: Python<'_>, len: usize) -> PyResult<Unfilled> {
        // SAFETY: with no content given, Python makes an object whose bytes are not set.
        let made = unsafe {
            let object = ffi::PyBytes_FromStringAndSize(std::ptr::null(), len as isize);
            Bound::from_owned_ptr_or_err(py, object)?
        };
        Ok(Unfilled(made.cast_into::<PyBytes>()?.unbind()))
    }

    /// The bytes. They are as good as zero to whoever writes first and reads then.
    pub(crate) fn content(&mut self, py: Python<'_>) -> &mut [u8] {
        let bytes = self.0.bind(py).as_bytes();
        // SAFETY: the object is this one's alone until `filled`, and bytes may be anything.
        unsafe { std::slice::from_raw_parts_mut(bytes.as_ptr().cast_mut(), bytes.len()) }
    }

    /// A copy of some bytes.
    pub(crate) fn copy<'py>(py: Python<'py>, bytes: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        let mut made = Unfilled::new(py, bytes.len())?;
        made.content(py).copy_from_slice(bytes);
        Ok(made.filled().into_bound(py))
    }

    pub(crate) fn filled(self) -> Py<PyBytes> {
        self.0
    }
}

/// Gets an object as `bytes`, with no copy besides the one into them. Called with Python's lock released.
fn get_bytes(client: &moontide_client::Store, key: &[u8]) -> Result<Option<Py<PyBytes>>, StoreError> {
    let mut made: Option<Unfilled> = None;
    let mut no_memory: Vec<u8> = Vec::new();
    let mut make = |len: usize| -> &mut [u8] {
        let content = Python::attach(|py| {
            made = Unfilled::new(py, len).ok();
            made.as_mut().map(|made| {
                let content = made.content(py);
                (content.as_mut_ptr(), content.len())
            })
        });
        match content {
            // SAFETY: the object is held by `made` until it is given out or replaced, and the one before is not used any
            // more when this is called again.
            Some((start, len)) => unsafe { std::slice::from_raw_parts_mut(start, len) },
            None => {
                // Python has none left: read it somewhere, and fail afterwards.
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
            what: "memory for the object's bytes",
            why: "there is none left".into(),
        }),
    }
}

#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (master=None, *, tenant="default", deadline=5.0, connect=3.0, local=true,
        verify_local=true, connections=2, hedge=true, locations=65536, rack="", zone=""))]
    #[allow(clippy::too_many_arguments)] // keywords of a constructor
    fn new(
        py: Python<'_>,
        master: Option<&str>,
        tenant: &str,
        deadline: f64,
        connect: f64,
        local: bool,
        verify_local: bool,
        connections: usize,
        hedge: bool,
        locations: usize,
        rack: &str,
        zone: &str,
    ) -> PyResult<Store> {
        let master = &master_or_default(master);
        let config = config(
            master,
            tenant,
            deadline,
            connect,
            local,
            verify_local,
            connections,
            hedge,
            locations,
            rack,
            zone,
        )?;
        let connected = py.detach(|| moontide_client::Store::connect(config));
        let held = OfProcess::new(connected.map_err(|error| errors::store(py, &error))?);
        Ok(Store { held, master: master.to_owned() })
    }

    /// Where its master is.
    #[getter]
    fn master(&self) -> &str {
        &self.master
    }

    /// Ends the connection. Calls under way end first; views stay good. A second time it does nothing.
    fn close(&self, py: Python<'_>) {
        if let Some(client) = self.held.take() {
            py.detach(|| drop(client));
        }
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.held.with(|_| ()).is_err()
    }

    // ------------------------------------------------------------------------------------------------------- put

    /// Stores bytes, a buffer or an array under a key. False: an object of this key was there, and stays.
    ///
    /// Elements that are scattered are collected first; everything else is sent from where it is. Options are those of
    /// PutOptions, also by name.
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

    /// Stores the bytes of several buffers, one after the other, as one object.
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

    /// Stores many objects; for each, whether it was stored. Raises BatchError if any failed, which has all outcomes.
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

    /// Stores an array with its type and shape, so that ``get_tensor`` gives the same array back.
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

    /// A copy of an object as bytes; None if there is no such object.
    fn get<'py>(&self, py: Python<'py>, key: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let (client, key) = (self.client(py)?, self::key(key)?);
        let here = client.get_ref_here(key).map_err(|error| errors::store(py, &error))?;
        if let Some(object) = here {
            let mut made = Unfilled::new(py, object.len())?;
            if copy_out(py, &client, &object, made.content(py)) {
                return Ok(Some(made.filled().into_bound(py)));
            }
        }
        let bytes = py.detach(|| get_bytes(&client, key)).map_err(|error| errors::store(py, &error))?;
        Ok(bytes.map(|bytes| bytes.into_bound(py)))
    }

    /// An object's bytes without a copy, if a node on this host has them; None if there is no such object.
    fn get_view(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<Option<View>> {
        Ok(self.object(py, self::key(key)?)?.map(View::new))
    }

    /// A tensor that was put as such, without a copy if a node on this host has it; None if there is no such object.
    fn get_tensor(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<Option<Tensor>> {
        Tensor::of(py, self.object(py, self::key(key)?)?)
    }

    /// A tensor if it was put as such, otherwise a View; None if there is no such object.
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

    /// Copies an object into memory that can be written, or one part after the other into a list of such; its length, or
    /// None if there is no such object. What is longer than the object stays as it was behind it.
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
        let here = client.get_ref_here(key).map_err(|error| errors::store(py, &error))?;
        if let Some(object) = here
            && let [target] = &mut targets[..]
            && let Some(space) = target.bytes().get_mut(..object.len())
            && copy_out(py, &client, &object, space)
        {
            return Ok(Some(object.len()));
        }
        let mut spaces: Vec<&mut [u8]> = targets.iter_mut().map(Target::bytes).collect();
        py.detach(|| get_into_parts(&client, key, &mut spaces)).map_err(|error| errors::store(py, &error))
    }

    /// Copies of many objects; None for those that are not there. Raises BatchError if any failed.
    fn batch_get<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let keys = Keys::of(keys)?;
        let keys = keys.bytes()?;
        let outcomes = self.call(py, |client| Ok(client.get_batch(&keys)))?;
        batch_bytes(py, outcomes)
    }

    /// Copies many objects, each into memory of its own (or a list of such); their lengths, None for those that are not
    /// there. Raises BatchError if any failed.
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

    /// Many objects as by ``get_view``. Raises BatchError if any failed.
    fn batch_get_view<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let keys = Keys::of(keys)?;
        let keys = keys.bytes()?;
        let outcomes = self.call(py, |client| Ok(get_refs(client, &keys)))?;
        errors::batch(py, outcomes.into_iter().map(|outcome| Ok(outcome?.map(View::new))).collect())
    }

    // --------------------------------------------------------------------------------------------------- the rest

    /// Whether there is such an object.
    fn exists(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<bool> {
        let key = self::key(key)?;
        self.call(py, |client| client.exists(key))
    }

    /// Which of the objects there are.
    fn batch_exists(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
        let keys = Keys::of(keys)?;
        let keys = keys.bytes()?;
        self.call(py, |client| client.exists_batch(&keys))
    }

    /// The id by which departures() name an object: 16 bytes. Another one after remove_all(force=True).
    fn object_id<'py>(&self, py: Python<'py>, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
        let id = self.client(py)?.object_id(self::key(key)?).map_err(|error| errors::store(py, &error))?;
        Ok(PyBytes::new(py, &id.0))
    }

    /// Follows what leaves the store from now on.
    fn departures(&self, py: Python<'_>) -> PyResult<Departures> {
        Ok(Departures::new(self.client(py)?.departures()))
    }

    /// Removes an object; whether there was one. With force also one that is leased or pinned.
    #[pyo3(signature = (key, force=false))]
    fn remove(&self, py: Python<'_>, key: &Bound<'_, PyAny>, force: bool) -> PyResult<bool> {
        let key = self::key(key)?;
        self.call(py, |client| client.remove(key, force))
    }

    /// Removes many objects; for each, whether there was one. Raises BatchError if any failed.
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

    /// Removes every object of the tenant; how many there were.
    #[pyo3(signature = (force=false))]
    fn remove_all(&self, py: Python<'_>, force: bool) -> PyResult<u64> {
        self.call(py, |client| client.remove_all(force))
    }

    /// Marks an object as used, so that it is evicted later; whether it is there.
    fn touch(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<bool> {
        let key = self::key(key)?;
        self.call(py, |client| client.touch(&[key])).map(|found| found[0])
    }

    /// Marks many objects as used; for each, whether it is there.
    fn batch_touch(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
        let keys = Keys::of(keys)?;
        let keys = keys.bytes()?;
        self.call(py, |client| client.touch(&keys))
    }

    /// Has objects that are on disk brought back into memory ahead of need; for each, whether it is there at all.
    fn prefetch(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
        let keys = Keys::of(keys)?;
        let keys = keys.bytes()?;
        self.call(py, |client| client.prefetch(&keys))
    }

    /// The keys that begin with a prefix, as bytes, in no order.
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

    /// What the master knows about an object, as a dict; None if there is no such object.
    fn stat<'py>(&self, py: Python<'py>, key: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let key = self::key(key)?;
        let Some(info) = self.call(py, |client| client.stat(key))? else { return Ok(None) };
        let dict = PyDict::new(py);
        dict.set_item("size", info.len)?;
        dict.set_item("pin", format!("{:?}", info.pin).to_lowercase())?;
        dict.set_item("version", info.epoch.bits())?;
        dict.set_item("writing", info.writing)?;
        let expires = (info.expires_unix_ms > 0).then(|| info.expires_unix_ms as f64 / 1e3);
        dict.set_item("expires", expires)?;
        let replicas = info.stripes.iter().map(|stripe| {
            let place = PyDict::new(py);
            place.set_item("node", node_name(stripe.node))?;
            place.set_item("medium", format!("{:?}", stripe.medium).to_lowercase())?;
            place.set_item("replica", stripe.replica)?;
            place.set_item("offset", stripe.offset)?;
            place.set_item("size", stripe.len)?;
            Ok(place)
        });
        dict.set_item("places", replicas.collect::<PyResult<Vec<_>>>()?)?;
        Ok(Some(dict))
    }

    /// The nodes that are registered now, a dict each.
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
            Ok(dict)
        });
        each.collect()
    }

    /// For moontide.compat: puts from addresses.
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

    /// For moontide.compat: gets to addresses.
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

    /// For moontide.compat: which objects there are, as numbers.
    fn _exists_codes(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
        addresses::exist(self, py, keys)
    }

    /// What this process has asked of the store so far, by name.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats_of(py, &self.client(py)?)
    }
}

/// As the command line names nodes.
fn node_name(node: NodeId) -> String {
    format!("{:016x}", node.0)
}

/// Memory for one object: a buffer, or a list or tuple of such.
pub(crate) fn targets(into: &Bound<'_, PyAny>) -> PyResult<Vec<Target>> {
    if into.is_instance_of::<PyList>() || into.is_instance_of::<pyo3::types::PyTuple>() {
        return into.try_iter()?.map(|part| Target::of(&part?)).collect();
    }
    Ok(vec![Target::of(into)?])
}

/// Copies of a batch, as `bytes`.
pub(crate) fn batch_bytes(
    py: Python<'_>,
    outcomes: Vec<Result<Option<Bytes>, StoreError>>,
) -> PyResult<Bound<'_, PyList>> {
    let mut all = Vec::with_capacity(outcomes.len());
    for outcome in outcomes {
        all.push(match outcome {
            Ok(Some(bytes)) => Ok(Some(Unfilled::copy(py, &bytes)?)),
            Ok(None) => Ok(None),
            Err(error) => Err(error),
        });
    }
    errors::batch(py, all)
}

/// Many objects, in place those that are here.
pub(crate) fn get_refs(
    client: &moontide_client::Store,
    keys: &[&[u8]],
) -> Vec<Result<Option<ObjectRef>, StoreError>> {
    let here: Vec<_> = keys.iter().map(|key| client.get_ref_here(key)).collect();
    let away = keys.iter().zip(&here).filter(|(_, here)| matches!(here, Ok(None))).map(|(key, _)| *key);
    let mut fetched = client.get_batch(&away.collect::<Vec<_>>()).into_iter();
    let whole = here.into_iter().map(|here| match here {
        Ok(None) => {
            let fetched = fetched.next().expect("one for each that is away");
            fetched.map(|bytes| bytes.map(ObjectRef::from))
        }
        here => here,
    });
    whole.collect()
}

/// The header that stands in front of an array, and its bytes.
pub(crate) fn tensor_parts(
    py: Python<'_>,
    array: &Bound<'_, PyAny>,
) -> PyResult<([u8; TENSOR_HEADER_BYTES], Source)> {
    let array = Array::of(array)?;
    let dtype = array.dtype.ok_or_else(|| {
        PyTypeError::new_err(
            "elements of this type have no name here; put the bytes, or view it as another type",
        )
    })?;
    let header = TensorHeader::new(dtype, &array.shape()).map_err(|error| no_tensor(py, error))?;
    Ok((header.encode(), array.into_source(py)?))
}

/// The counters of a store, by name.
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

/// Copies an object, part by part.
pub(crate) fn get_into_parts(
    client: &moontide_client::Store,
    key: &[u8],
    spaces: &mut [&mut [u8]],
) -> Result<Option<usize>, StoreError> {
    match spaces {
        [space] => client.get_into(key, space),
        spaces => {
            if let Some(object) = client.get_ref_here(key)? {
                let mut spaces = cut(spaces, object.len())?;
                if client.copy_out_parts(&object, &mut spaces) {
                    return Ok(Some(object.len()));
                }
            }
            let Some(object) = client.get(key)? else { return Ok(None) };
            scatter(client, &object.into(), spaces).map(Some)
        }
    }
}

/// Copies many objects, each part by part.
pub(crate) fn get_batch_into_parts(
    client: &moontide_client::Store,
    keys: &[&[u8]],
    spaces: &mut [Vec<&mut [u8]>],
) -> Vec<Result<Option<usize>, StoreError>> {
    if spaces.iter().all(|spaces| spaces.len() == 1) {
        let each = keys.iter().zip(spaces).map(|(key, spaces)| GetInto { key, into: &mut *spaces[0] });
        return client.get_batch_into(&mut each.collect::<Vec<_>>());
    }
    // In place those that are here, and the others all together.
    let mut answers: Vec<Option<Result<Option<usize>, StoreError>>> = Vec::with_capacity(keys.len());
    for (key, spaces) in keys.iter().zip(spaces.iter_mut()) {
        answers.push(match client.get_ref_here(key) {
            Ok(Some(object)) => match cut(spaces, object.len()) {
                Ok(mut spaces) => {
                    client.copy_out_parts(&object, &mut spaces).then_some(Ok(Some(object.len())))
                }
                Err(error) => Some(Err(error)),
            },
            Ok(None) => None,
            Err(error) => Some(Err(error)),
        });
    }
    let away: Vec<usize> = (0..keys.len()).filter(|&at| answers[at].is_none()).collect();
    let objects = client.get_batch(&away.iter().map(|&at| keys[at]).collect::<Vec<_>>());
    for (at, object) in away.into_iter().zip(objects) {
        answers[at] = Some(object.and_then(|object| {
            object.map(|object| scatter(client, &object.into(), &mut spaces[at])).transpose()
        }));
    }
    answers.into_iter().map(|answer| answer.expect("each was here or away")).collect()
}

/// The part of some memory that so many bytes take.
fn cut<'a>(spaces: &'a mut [&mut [u8]], len: usize) -> Result<Vec<&'a mut [u8]>, StoreError> {
    let room = spaces.iter().map(|space| space.len()).sum();
    if len > room {
        return Err(StoreError::BufferTooSmall { len: len as u64, room });
    }
    let mut left = len;
    let each = spaces.iter_mut().map(|space| {
        let part = left.min(space.len());
        left -= part;
        &mut space[..part]
    });
    Ok(each.collect())
}

/// Copies an object that is a copy already.
fn scatter(
    client: &moontide_client::Store,
    object: &ObjectRef,
    spaces: &mut [&mut [u8]],
) -> Result<usize, StoreError> {
    client.copy_out_parts(object, &mut cut(spaces, object.len())?);
    Ok(object.len())
}

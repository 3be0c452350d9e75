//! Arguments of calls: keys, durations, [`PutOptions`].

use std::time::Duration;

use moontide_types::record::PinClass;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use crate::errors;

/// The bytes of a key: text is stored as UTF-8.
pub(crate) fn key<'a>(key: &'a Bound<'_, PyAny>) -> PyResult<&'a [u8]> {
    if let Ok(text) = key.cast::<PyString>() {
        return Ok(text.to_str()?.as_bytes());
    }
    if let Ok(bytes) = key.cast::<PyBytes>() {
        return Ok(bytes.as_bytes());
    }
    Err(PyTypeError::new_err(format!("a key is a str or bytes, not {}", key.get_type().name()?)))
}

/// Keys that are held while Python's lock is released.
pub(crate) struct Keys<'py>(Vec<Bound<'py, PyAny>>);

impl<'py> Keys<'py> {
    pub(crate) fn of(keys: &Bound<'py, PyAny>) -> PyResult<Keys<'py>> {
        if keys.is_instance_of::<PyString>() || keys.is_instance_of::<PyBytes>() {
            return Err(PyTypeError::new_err("a list of keys is expected, not one key"));
        }
        Ok(Keys(keys.try_iter()?.collect::<PyResult<_>>()?))
    }

    pub(crate) fn bytes(&self) -> PyResult<Vec<&[u8]>> {
        self.0.iter().map(key).collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

/// Refuses lists that do not belong together.
pub(crate) fn same_length(keys: usize, others: usize, what: &str) -> PyResult<()> {
    match keys == others {
        true => Ok(()),
        false => Err(errors::argument(format!("{keys} keys, but {others} {what}"))),
    }
}

/// Seconds, as Python counts them.
pub(crate) fn seconds(what: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| errors::argument(format!("{what} must be a number of seconds, not {seconds}")))
}

/// How long an object may live.
fn lifetime(ttl: f64) -> PyResult<Duration> {
    const MAX_S: f64 = 1e9;
    match ttl {
        0.001..=MAX_S => seconds("ttl", ttl),
        _ => Err(errors::argument(format!("ttl must be a number of seconds, 0.001 to {MAX_S:e}, not {ttl}"))),
    }
}

/// A number that the store knows the bounds of.
fn small<T: TryFrom<i64>>(what: &str, number: i64) -> PyResult<T> {
    T::try_from(number).map_err(|_| errors::argument(format!("{what} cannot be {number}")))
}

/// How an object is to be stored.
///
/// The same names are accepted as keyword arguments by every put:
/// ``store.put("k", b"v", replicas=2)`` is ``store.put("k", b"v", PutOptions(replicas=2))``.
///
/// - ``replicas``: copies on as many nodes; ``replicas_min``: fewest that will do.
/// - ``stripes``: pieces of each copy, on as many nodes; None leaves it to the master.
/// - ``overwrite``: replace an object of the same key.
/// - ``ttl``: seconds after which it may be forgotten; None: when room is needed.
/// - ``pin``: "soft" is evicted last, "hard" never, and removed only by force.
/// - ``cohort``: label of objects that are evicted together.
/// - ``near``: prefer memory of this host.
#[pyclass(module = "moontide", frozen, eq)]
#[derive(Clone, Debug)]
pub(crate) struct PutOptions(pub(crate) moontide_client::PutOptions);

impl PartialEq for PutOptions {
    fn eq(&self, other: &PutOptions) -> bool {
        format!("{:?}", self.0) == format!("{:?}", other.0)
    }
}

#[pymethods]
impl PutOptions {
    #[new]
    #[pyo3(signature = (*, replicas=1, replicas_min=1, stripes=None, overwrite=false, ttl=None, pin="none", cohort=None, near=true))]
    #[allow(clippy::too_many_arguments)] // keywords of a constructor
    fn new(
        replicas: i64,
        replicas_min: i64,
        stripes: Option<i64>,
        overwrite: bool,
        ttl: Option<f64>,
        pin: &str,
        cohort: Option<Bound<'_, PyAny>>,
        near: bool,
    ) -> PyResult<PutOptions> {
        let pin = match pin {
            "none" => PinClass::None,
            "soft" => PinClass::Soft,
            "hard" => PinClass::Hard,
            other => {
                return Err(errors::argument(format!(
                    "pin must be \"none\", \"soft\" or \"hard\", not {other:?}"
                )));
            }
        };
        Ok(PutOptions(moontide_client::PutOptions {
            replicas: small("replicas", replicas)?,
            replicas_min: small("replicas_min", replicas_min)?,
            stripes: stripes.map(|stripes| small("stripes", stripes)).transpose()?,
            upsert: overwrite,
            ttl: ttl.map(lifetime).transpose()?,
            pin,
            cohort: cohort.as_ref().map(key).transpose()?.map(<[u8]>::to_vec),
            parent: None,
            near,
            prefer: None,
        }))
    }

    fn __repr__(&self) -> String {
        let o = &self.0;
        let stripes = o.stripes.map_or("None".to_owned(), |stripes| stripes.to_string());
        let ttl = o.ttl.map_or("None".to_owned(), |ttl| ttl.as_secs_f64().to_string());
        let pin = format!("{:?}", o.pin).to_lowercase();
        format!(
            "PutOptions(replicas={}, replicas_min={}, stripes={stripes}, overwrite={}, ttl={ttl}, pin={pin:?}, near={})",
            o.replicas,
            o.replicas_min,
            python_bool(o.upsert),
            python_bool(o.near),
        )
    }
}

pub(crate) fn python_bool(value: bool) -> &'static str {
    if value { "True" } else { "False" }
}

/// Options of a put: given as such, or by their names.
pub(crate) fn put_options(
    py: Python<'_>,
    options: Option<&Bound<'_, PutOptions>>,
    named: Option<&Bound<'_, PyDict>>,
) -> PyResult<moontide_client::PutOptions> {
    match (options, named) {
        (None, None) => Ok(moontide_client::PutOptions::default()),
        (Some(options), None) => Ok(options.get().0.clone()),
        (None, Some(named)) => {
            let made = py.get_type::<PutOptions>().call((), Some(named))?;
            Ok(made.cast::<PutOptions>()?.get().0.clone())
        }
        (Some(_), Some(_)) => {
            Err(PyTypeError::new_err("options are given as PutOptions or by name, not both"))
        }
    }
}

//! Arguments of calls: keys, durations, settings, [`PutOptions`].

use std::path::PathBuf;
use std::time::Duration;

use moontide_client::{InvalidPlace, Place, Spread};
use moontide_settings::{Component, Form, Kind, Loaded, Origin, Setting};
use moontide_types::record::PinClass;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyString};

use crate::errors;

/// Returns the bytes of a key. Text is encoded as UTF-8.
pub(crate) fn key<'a>(key: &'a Bound<'_, PyAny>) -> PyResult<&'a [u8]> {
    if let Ok(text) = key.cast::<PyString>() {
        return Ok(text.to_str()?.as_bytes());
    }
    if let Ok(bytes) = key.cast::<PyBytes>() {
        return Ok(bytes.as_bytes());
    }
    Err(PyTypeError::new_err(format!("a key is a str or bytes, not {}", key.get_type().name()?)))
}

/// Keys that stay referenced while the GIL is released.
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

/// Fails if two lists of a call differ in length.
pub(crate) fn same_length(keys: usize, others: usize, what: &str) -> PyResult<()> {
    match keys == others {
        true => Ok(()),
        false => Err(errors::argument(format!("{keys} keys, but {others} {what}"))),
    }
}

/// Converts seconds to a duration.
pub(crate) fn seconds(what: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| errors::argument(format!("{what} must be a number of seconds, not {seconds}")))
}

/// Sets settings from keyword arguments. Their names are those of the file, with `_` for `.`. Numbers for durations are
/// seconds; text has the form of the file, e.g. `"4GiB"` or `"500ms"`.
pub(crate) fn set_named<C: Component>(
    loaded: &mut Loaded<C>,
    settings: Option<&Bound<'_, PyDict>>,
) -> PyResult<()> {
    let table = C::table();
    for (name, value) in settings.into_iter().flat_map(|settings| settings.iter()) {
        let name: String = name.extract()?;
        let Some(setting) = table.iter().find(|setting| setting.key().replace('.', "_") == name) else {
            return Err(PyTypeError::new_err(format!("{name:?} is no setting")));
        };
        let text = setting_text(setting, &name, &value)?;
        loaded.set(&setting.key(), &text, Origin::Argument(name)).map_err(errors::argument)?;
    }
    Ok(())
}

/// Returns the text form of a setting's value.
fn setting_text(setting: &Setting, name: &str, value: &Bound<'_, PyAny>) -> PyResult<String> {
    let is_bool = value.is_instance_of::<PyBool>();
    let is_number = !is_bool && (value.is_instance_of::<PyInt>() || value.is_instance_of::<PyFloat>());
    let placeholder = setting.value.placeholder;
    match placeholder {
        "BOOL" if !is_bool => {}
        _ if is_bool => return Ok(value.extract::<bool>()?.to_string()),
        _ if value.is_none() && setting.value.is_optional => return Ok("none".to_owned()),
        _ if is_number && placeholder.contains("TIME") => {
            return Ok(Duration::text(&seconds(name, value.extract()?)?));
        }
        _ if value.is_instance_of::<PyInt>() => return Ok(value.str()?.to_str()?.to_owned()),
        "PATH" if setting.value.form == Form::List && !value.is_instance_of::<PyString>() => {
            // One path, or several.
            if let Ok(path) = value.extract::<PathBuf>() {
                return Ok(path.to_string_lossy().into_owned());
            }
            let paths = value.extract::<Vec<PathBuf>>()?;
            let paths: Vec<_> = paths.iter().map(|path| path.to_string_lossy().into_owned()).collect();
            return Ok(paths.join(","));
        }
        "PATH" => return Ok(value.extract::<PathBuf>()?.to_string_lossy().into_owned()),
        _ if value.is_instance_of::<PyString>() => return value.extract(),
        _ => {}
    }
    let found = value.get_type().name()?.to_string();
    Err(PyTypeError::new_err(format!("{name} is {}, not {found}", setting.value)))
}

/// Converts the time to live of an object.
fn lifetime(ttl: f64) -> PyResult<Duration> {
    const MAX_S: f64 = 1e9;
    match ttl {
        0.001..=MAX_S => seconds("ttl", ttl),
        _ => Err(errors::argument(format!("ttl must be a number of seconds, 0.001 to {MAX_S:e}, not {ttl}"))),
    }
}

/// Converts a number whose range the store checks.
fn small<T: TryFrom<i64>>(what: &str, number: i64) -> PyResult<T> {
    T::try_from(number).map_err(|_| errors::argument(format!("{what} cannot be {number}")))
}

/// Converts a node or segment that a put prefers.
fn place(text: &str) -> PyResult<Place> {
    text.parse().map_err(|error: InvalidPlace| errors::argument(format!("prefer: {error}")))
}

/// Converts what the replicas of an object must not share.
fn spread_of(name: &str) -> PyResult<Spread> {
    Spread::from_name(name).ok_or_else(|| {
        errors::argument(format!("spread must be None, \"host\", \"rack\" or \"zone\", not {name:?}"))
    })
}

/// Options of a put.
///
/// Every put also takes the fields as keyword arguments:
/// ``store.put("k", b"v", replicas=2)`` equals ``store.put("k", b"v", PutOptions(replicas=2))``.
///
/// - ``replicas``: number of replicas, each on a different node; ``replicas_min``: the put fails with fewer.
/// - ``disk_replicas``: disks that shall have the object, besides memory; written after the put, as far as there are disks.
/// - ``stripes``: stripes of each replica, on different nodes; None: the master decides.
/// - ``overwrite``: replace an existing object; raises Pending if it is stored, but a node may return with the old one.
/// - ``ttl``: time to live in seconds; None: until evicted.
/// - ``pin``: "soft" is evicted last, "hard" never; "hard" is removed only with force.
/// - ``cohort``: label of objects that are evicted together.
/// - ``spread``: "host", "rack" or "zone": each replica is in a different one, or not made; None: on different nodes.
/// - ``prefer``: nodes and segments to try first, in order, as ``"NODE"`` or ``"NODE/SEGMENT"``; at most 8.
/// - ``prefer_local``: prefer memory of a local node to other nodes that are not in ``prefer``.
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
    #[pyo3(signature = (*, replicas=1, replicas_min=1, disk_replicas=0, stripes=None, overwrite=false, ttl=None, pin="none", cohort=None,
        spread=None, prefer=vec![], prefer_local=true))]
    #[allow(clippy::too_many_arguments)] // keywords of a constructor
    fn new(
        replicas: i64,
        replicas_min: i64,
        disk_replicas: i64,
        stripes: Option<i64>,
        overwrite: bool,
        ttl: Option<f64>,
        pin: &str,
        cohort: Option<Bound<'_, PyAny>>,
        spread: Option<&str>,
        prefer: Vec<String>,
        prefer_local: bool,
    ) -> PyResult<PutOptions> {
        let pin = pin_class(pin)?;
        Ok(PutOptions(moontide_client::PutOptions {
            replicas: small("replicas", replicas)?,
            replicas_min: small("replicas_min", replicas_min)?,
            disk_replicas: small("disk_replicas", disk_replicas)?,
            stripes: stripes.map(|stripes| small("stripes", stripes)).transpose()?,
            upsert: overwrite,
            ttl: ttl.map(lifetime).transpose()?,
            pin,
            cohort: cohort.as_ref().map(key).transpose()?.map(<[u8]>::to_vec),
            parent: None,
            spread: spread.map(spread_of).transpose()?,
            prefer: prefer.iter().map(|text| place(text)).collect::<PyResult<_>>()?,
            prefer_local,
        }))
    }

    fn __repr__(&self) -> String {
        let o = &self.0;
        let stripes = o.stripes.map_or("None".to_owned(), |stripes| stripes.to_string());
        let ttl = o.ttl.map_or("None".to_owned(), |ttl| ttl.as_secs_f64().to_string());
        let pin = format!("{:?}", o.pin).to_lowercase();
        let spread = o.spread.map_or("None".to_owned(), |spread| format!("'{spread}'"));
        let prefer: Vec<String> = o.prefer.iter().map(|place| format!("'{place}'")).collect();
        format!(
            "PutOptions(replicas={}, replicas_min={}, disk_replicas={}, stripes={stripes}, overwrite={}, ttl={ttl}, pin={pin:?}, spread={spread}, prefer=[{}], prefer_local={})",
            o.replicas,
            o.replicas_min,
            o.disk_replicas,
            python_bool(o.upsert),
            prefer.join(", "),
            python_bool(o.prefer_local),
        )
    }
}

pub(crate) fn python_bool(value: bool) -> &'static str {
    if value { "True" } else { "False" }
}

/// Returns the options of a put, from a `PutOptions` or from keywords.
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
            Err(PyTypeError::new_err("pass options as PutOptions or as keywords, not both"))
        }
    }
}

/// Parses the name of a pin class.
pub(crate) fn pin_class(pin: &str) -> PyResult<PinClass> {
    match pin {
        "none" => Ok(PinClass::None),
        "soft" => Ok(PinClass::Soft),
        "hard" => Ok(PinClass::Hard),
        other => Err(errors::argument(format!("pin must be \"none\", \"soft\" or \"hard\", not {other:?}"))),
    }
}

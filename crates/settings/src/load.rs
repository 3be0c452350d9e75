//! [`load`]: merges defaults, file, environment and flags.

use std::collections::BTreeMap;
use std::path::Path;

use toml::de::{DeTable, DeValue};

use crate::declare::{Component, SetError};
use crate::error::{InvalidConfig, Origin, SettingsError};
use crate::kind::{Form, ValueInfo};

/// Loaded settings, not checked yet.
#[derive(Clone, Debug)]
pub struct Loaded<C> {
    /// Effective settings.
    pub config: C,
    /// Environment variables with the prefix of the component that name no setting. Not an error: Kubernetes sets such
    /// variables for every service, e.g. `MOONTIDE_MASTER_PORT`.
    pub unknown_variables: Vec<String>,
    /// Source of each setting that is not a default, by key.
    origins: BTreeMap<String, Origin>,
}

impl<C: Component> Loaded<C> {
    /// Sets a setting. `name` is its key or the name of its flag.
    pub fn set(&mut self, name: &str, text: &str, origin: Origin) -> Result<(), SettingsError> {
        let key = C::table().iter().find(|s| s.key() == name || s.flag() == name).map(|s| s.key());
        let Some(key) = key else {
            return Err(SettingsError::Unknown { origin, command: C::COMMAND });
        };
        match self.config.set(&key, text) {
            Ok(()) => {
                self.origins.insert(key, origin);
                Ok(())
            }
            Err(SetError::Unknown) => Err(SettingsError::Unknown { origin, command: C::COMMAND }),
            Err(SetError::Value(expected)) => {
                Err(SettingsError::Value { origin, found: text.to_owned(), expected })
            }
        }
    }

    /// Checks all settings. An error names the source of the value.
    pub fn check(&self) -> Result<(), InvalidConfig> {
        self.config.check().map_err(|mut invalid| {
            for error in &mut invalid.errors {
                error.origin = self.origins.get(&error.setting).cloned();
            }
            invalid
        })
    }

    fn read_file(&mut self, path: &Path) -> Result<(), SettingsError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| SettingsError::File { path: path.to_owned(), source })?;
        let parsed = DeTable::parse(&text).map_err(|source| SettingsError::Toml {
            path: path.to_owned(),
            source: Box::new(source),
            command: C::COMMAND,
        })?;
        let origin = |key: &str, at: usize| Origin::File {
            path: path.to_owned(),
            line: text[..at].lines().count().max(1),
            key: key.to_owned(),
        };
        let sections: Vec<&str> = C::table().iter().filter_map(|setting| setting.section).collect();
        for (name, value) in parsed.get_ref() {
            let (name, at) = (name.get_ref(), name.span().end);
            match value.get_ref() {
                DeValue::Table(table) if sections.contains(&name.as_ref()) => {
                    for (inner, value) in table {
                        let key = format!("{name}.{}", inner.get_ref());
                        self.set_from_file(&key, value.get_ref(), origin(&key, inner.span().end))?;
                    }
                }
                value => self.set_from_file(name, value, origin(name, at))?,
            }
        }
        Ok(())
    }

    fn set_from_file(&mut self, key: &str, value: &DeValue<'_>, origin: Origin) -> Result<(), SettingsError> {
        let setting = C::table().into_iter().find(|setting| setting.key() == key);
        let Some(setting) = setting else {
            return Err(SettingsError::Unknown { origin, command: C::COMMAND });
        };
        match text_of(value, setting.value) {
            Some(text) => self.set(key, &text, origin),
            None => Err(SettingsError::Value { origin, found: describe(value), expected: setting.value }),
        }
    }
}

/// Returns the text form of a value in a file; `None` if it has the wrong type.
fn text_of(value: &DeValue<'_>, info: &ValueInfo) -> Option<String> {
    match (value, info.form) {
        (DeValue::String(text), _) => Some(text.clone().into_owned()),
        (DeValue::Integer(number), Form::Scalar) => {
            Some(u64::from_str_radix(number.as_str(), number.radix()).ok()?.to_string())
        }
        (DeValue::Boolean(value), Form::Scalar) => Some(value.to_string()),
        (DeValue::Array(parts), Form::List) => {
            let parts: Option<Vec<&str>> = parts.iter().map(|part| part.get_ref().as_str()).collect();
            Some(parts?.join(","))
        }
        _ => None,
    }
}

/// Returns a description of a value of the wrong type, for errors.
fn describe(value: &DeValue<'_>) -> String {
    match value {
        DeValue::Integer(number) => number.to_string(),
        DeValue::Float(number) => number.to_string(),
        DeValue::Boolean(value) => value.to_string(),
        other => other.type_str().to_owned(),
    }
}

/// Merges the sources; later ones win. `flags` are names with values. The result is not checked yet.
pub fn load<'f, C: Component>(
    defaults: C,
    file: Option<&Path>,
    environment: impl IntoIterator<Item = (String, String)>,
    flags: impl IntoIterator<Item = (&'f str, &'f str)>,
) -> Result<Loaded<C>, SettingsError> {
    let mut loaded = Loaded { config: defaults, unknown_variables: Vec::new(), origins: BTreeMap::new() };
    if let Some(path) = file {
        loaded.read_file(path)?;
    }
    let variables: BTreeMap<String, String> =
        C::table().iter().map(|setting| (setting.variable(C::PREFIX), setting.key())).collect();
    for (variable, text) in environment {
        match variables.get(&variable) {
            Some(key) => loaded.set(key, &text, Origin::Variable(variable))?,
            None if variable.starts_with(C::PREFIX) => loaded.unknown_variables.push(variable),
            None => {}
        }
    }
    for (name, text) in flags {
        loaded.set(name, text, Origin::Flag(name.replace(['.', '_'], "-")))?;
    }
    Ok(loaded)
}

/// Returns the environment of this process. No setting has a name or a value that is not UTF-8.
pub fn process_environment() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}

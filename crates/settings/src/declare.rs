//! Declaration of settings: the macro [`settings!`](crate::settings), and the traits that it implements.

use std::ops::{RangeFrom, RangeInclusive};

use crate::error::{InvalidConfig, InvalidSetting};
use crate::kind::ValueInfo;

/// Description of one setting.
#[derive(Clone, Debug)]
pub struct Setting {
    /// Table of the file that has the setting; `None`: no table.
    pub section: Option<&'static str>,
    /// Name in the file.
    pub name: &'static str,
    /// Comment of the declaration. The first paragraph is the help text.
    pub doc: &'static str,
    /// Description of valid values.
    pub value: &'static ValueInfo,
    /// Text of the default value.
    pub default: String,
    /// Description of a default that depends on the host.
    pub shown: Option<&'static str>,
    /// Second name of the flag.
    pub alias: Option<&'static str>,
    /// Environment variable, if its name does not follow from the setting.
    pub variable: Option<&'static str>,
}

impl Setting {
    /// Moves the setting into a section.
    pub fn within(self, section: &'static str) -> Setting {
        Setting { section: Some(section), ..self }
    }

    /// Returns the unique name: `name`, or `section.name`.
    pub fn key(&self) -> String {
        match self.section {
            Some(section) => format!("{section}.{}", self.name),
            None => self.name.to_owned(),
        }
    }

    /// Returns the name of the flag, without `--`.
    pub fn flag(&self) -> String {
        self.key().replace(['.', '_'], "-")
    }

    /// Returns the name of the environment variable.
    pub fn variable(&self, prefix: &str) -> String {
        match self.variable {
            Some(variable) => variable.to_owned(),
            None => format!("{prefix}{}", self.key().replace('.', "_").to_ascii_uppercase()),
        }
    }

    /// Returns the help text: the first paragraph of the comment, without the full stop at its end.
    pub fn help(&self) -> String {
        let lines = self.doc.lines().map(str::trim).take_while(|line| !line.is_empty());
        lines.collect::<Vec<_>>().join(" ").trim_end_matches('.').to_owned()
    }

    /// Returns the further paragraphs of the comment.
    pub fn details(&self) -> Vec<String> {
        let mut paragraphs = vec![String::new()];
        for line in self.doc.trim().lines().map(str::trim) {
            match paragraphs.last_mut() {
                Some(last) if !line.is_empty() => {
                    if !last.is_empty() {
                        last.push(' ');
                    }
                    last.push_str(line);
                }
                _ => paragraphs.push(String::new()),
            }
        }
        paragraphs.split_off(1)
    }

    /// Returns the description of the default value for help texts.
    pub fn shown_default(&self) -> String {
        match (self.shown, self.default.as_str()) {
            (Some(shown), _) => shown.to_owned(),
            (None, "") => "empty".to_owned(),
            (None, default) => default.to_owned(),
        }
    }
}

/// Error of [`Settings::set`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetError {
    /// No setting has this key.
    Unknown,
    /// The text is no value of the setting.
    Value(&'static ValueInfo),
}

/// A struct whose fields are settings. [`settings!`](crate::settings) implements it.
pub trait Settings: Clone + Default {
    /// Returns all settings in the order of the declaration; those of sections are last.
    fn table() -> Vec<Setting>;

    /// Returns the text of a setting; `None` if no setting has this key.
    fn get(&self, key: &str) -> Option<String>;

    /// Sets a setting from text.
    fn set(&mut self, key: &str, text: &str) -> Result<(), SetError>;

    /// Appends an error for each value outside of its range.
    fn check_ranges(&self, errors: &mut Vec<InvalidSetting>);
}

/// All settings of one component: a master, a node, a client.
pub trait Component: Settings {
    /// Prefix of the environment variables.
    const PREFIX: &'static str;
    /// Command whose `--print-config` prints all settings.
    const COMMAND: &'static str;

    /// Appends an error for each violated rule besides the ranges.
    fn check_rules(&self, errors: &mut Vec<InvalidSetting>);

    /// Checks all ranges and rules. Fails with every invalid setting.
    fn check(&self) -> Result<(), InvalidConfig> {
        let mut errors = Vec::new();
        self.check_ranges(&mut errors);
        self.check_rules(&mut errors);
        if errors.is_empty() { Ok(()) } else { Err(InvalidConfig { errors }) }
    }
}

/// A section that is absent while all of its settings have their defaults.
pub trait OptionalSection<T> {
    /// Returns the text of a setting of the section.
    fn get_in(&self, name: &str) -> Option<String>;
    /// Sets a setting of the section.
    fn set_in(&mut self, name: &str, text: &str) -> Result<(), SetError>;
    /// Checks the ranges of a section that is present.
    fn check_in(&self, section: &str, errors: &mut Vec<InvalidSetting>);
}

impl<T: Settings + PartialEq> OptionalSection<T> for Option<T> {
    fn get_in(&self, name: &str) -> Option<String> {
        match self {
            Some(section) => section.get(name),
            None => T::default().get(name),
        }
    }

    fn set_in(&mut self, name: &str, text: &str) -> Result<(), SetError> {
        let mut section = self.clone().unwrap_or_default();
        section.set(name, text)?;
        *self = (section != T::default()).then_some(section);
        Ok(())
    }

    fn check_in(&self, section: &str, errors: &mut Vec<InvalidSetting>) {
        let Some(settings) = self else { return };
        let first = errors.len();
        settings.check_ranges(errors);
        for error in &mut errors[first..] {
            error.setting = format!("{section}.{}", error.setting);
        }
    }
}

/// Range of valid values of a setting: `min..=max` or `min..`.
pub trait ValueRange<T> {
    /// Whether the range contains the value.
    fn has(&self, value: &T) -> bool;
    /// Describes the range, for errors.
    fn describe(&self, text: impl Fn(&T) -> String) -> String;
}

impl<T: PartialOrd> ValueRange<T> for RangeInclusive<T> {
    fn has(&self, value: &T) -> bool {
        self.contains(value)
    }

    fn describe(&self, text: impl Fn(&T) -> String) -> String {
        format!("{} to {}", text(self.start()), text(self.end()))
    }
}

impl<T: PartialOrd> ValueRange<T> for RangeFrom<T> {
    fn has(&self, value: &T) -> bool {
        self.contains(value)
    }

    fn describe(&self, text: impl Fn(&T) -> String) -> String {
        format!("at least {}", text(&self.start))
    }
}

/// Declares a struct of settings and implements [`Settings`] and [`Default`] for it.
///
/// A field has a comment (first paragraph: help text; further ones: only in the printed file), a type, an optional
/// [`Kind`](crate::Kind) after `as` if the type alone does not determine the unit, and a default. Options in this
/// order: `in RANGE, "hint"` for a range, `alias "flag"` for a second flag, `variable "NAME"` for a variable whose name
/// does not follow from the setting, `shown "text"` for a default that depends on the host.
///
/// `sections` are optional tables of the file. `fields` are no settings: only programs set them.
#[macro_export]
macro_rules! settings {
    (
        $(#[$meta:meta])*
        $vis:vis struct $config:ident {
            $(
                $(#[doc = $doc:literal])+
                $name:ident: $type:ty $(as $kind:ty)? = $default:expr
                    $(, in $range:expr, $hint:literal)?
                    $(, alias $alias:literal)?
                    $(, variable $variable:literal)?
                    $(, shown $shown:literal)?;
            )*
        }
        $(sections { $($(#[doc = $section_doc:literal])+ $section:ident: $section_type:ty;)* })?
        $(fields { $($(#[doc = $field_doc:literal])+ $field:ident: $field_type:ty = $field_default:expr;)* })?
    ) => {
        $(#[$meta])*
        $vis struct $config {
            $($(#[doc = $doc])+ pub $name: $type,)*
            $($($(#[doc = $section_doc])+ pub $section: Option<$section_type>,)*)?
            $($($(#[doc = $field_doc])+ pub $field: $field_type,)*)?
        }

        impl Default for $config {
            fn default() -> $config {
                $config {
                    $($name: $default,)*
                    $($($section: None,)*)?
                    $($($field: $field_default,)*)?
                }
            }
        }

        impl $crate::Settings for $config {
            fn table() -> Vec<$crate::Setting> {
                let defaults = $config::default();
                let own = vec![$($crate::Setting {
                    section: None,
                    name: stringify!($name),
                    doc: concat!($($doc, "\n"),+),
                    value: &<$crate::settings!(@kind $type $(as $kind)?) as $crate::Kind>::INFO,
                    default: <$crate::settings!(@kind $type $(as $kind)?) as $crate::Kind>::text(&defaults.$name),
                    shown: $crate::settings!(@option $($shown)?),
                    alias: $crate::settings!(@option $($alias)?),
                    variable: $crate::settings!(@option $($variable)?),
                },)*];
                own.into_iter()
                    $($(.chain(
                        <$section_type as $crate::Settings>::table()
                            .into_iter()
                            .map(|setting| setting.within(stringify!($section))),
                    ))*)?
                    .collect()
            }

            fn get(&self, key: &str) -> Option<String> {
                match key.split_once('.') {
                    None => match key {
                        $(stringify!($name) => {
                            Some(<$crate::settings!(@kind $type $(as $kind)?) as $crate::Kind>::text(&self.$name))
                        })*
                        _ => None,
                    },
                    $($(Some((stringify!($section), name)) => {
                        $crate::OptionalSection::<$section_type>::get_in(&self.$section, name)
                    })*)?
                    Some(_) => None,
                }
            }

            fn set(&mut self, key: &str, text: &str) -> Result<(), $crate::SetError> {
                match key.split_once('.') {
                    None => match key {
                        $(stringify!($name) => {
                            let parsed = <$crate::settings!(@kind $type $(as $kind)?) as $crate::Kind>::parse(text);
                            self.$name = parsed.ok_or($crate::SetError::Value(
                                &<$crate::settings!(@kind $type $(as $kind)?) as $crate::Kind>::INFO,
                            ))?;
                            Ok(())
                        })*
                        _ => Err($crate::SetError::Unknown),
                    },
                    $($(Some((stringify!($section), name)) => {
                        $crate::OptionalSection::<$section_type>::set_in(&mut self.$section, name, text)
                    })*)?
                    Some(_) => Err($crate::SetError::Unknown),
                }
            }

            fn check_ranges(&self, errors: &mut Vec<$crate::InvalidSetting>) {
                $($crate::settings!(
                    @range errors, $name, &self.$name,
                    <$crate::settings!(@kind $type $(as $kind)?) as $crate::Kind>::text
                    $(, $range, $hint)?
                );)*
                $($($crate::OptionalSection::<$section_type>::check_in(
                    &self.$section, stringify!($section), errors,
                );)*)?
                let _ = errors;
            }
        }
    };
    (@kind $type:ty) => { $type };
    (@kind $type:ty as $kind:ty) => { $kind };
    (@range $errors:ident, $name:ident, $value:expr, $text:expr) => {};
    (@range $errors:ident, $name:ident, $value:expr, $text:expr, $range:expr, $hint:literal) => {
        let (value, range) = ($value, $range);
        if !$crate::ValueRange::has(&range, value) {
            let allowed = $crate::ValueRange::describe(&range, $text);
            let rule = format!("is {}, allowed is {allowed}", $text(value));
            $errors.push($crate::InvalidSetting::new(stringify!($name), rule, $hint));
        }
    };
    (@option) => { None };
    (@option $value:literal) => { Some($value) };
}

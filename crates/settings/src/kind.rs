//! [`Kind`]: the types of values, each with one text form for files, environment and flags.
//!
//! A type with one obvious unit is its own kind (`u16`, `bool`, [`Duration`], [`SocketAddr`]). Other fields name a kind
//! with a unit: [`Bytes`], [`Millis`]. `Option` of a kind accepts `none`, `Vec` of a kind is a list.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use moontide_types::NodeId;

/// Longest name of a host in the DNS.
const HOST_NAME_BYTES_MAX: usize = 253;

/// Form of a value in a TOML file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Number or boolean, or a string with the text form.
    Scalar,
    /// String.
    Text,
    /// Array of strings, or one string with commas.
    List,
}

/// Description of the valid values of a kind, for help texts and errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValueInfo {
    /// Placeholder in help texts.
    pub placeholder: &'static str,
    /// Noun phrase.
    pub expected: &'static str,
    /// A valid value; empty if `expected` lists all of them.
    pub example: &'static str,
    /// Form in a file.
    pub form: Form,
    /// Whether `none` is valid.
    pub is_optional: bool,
}

impl fmt::Display for ValueInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)?;
        if !self.example.is_empty() {
            write!(f, ", e.g. {}", self.example)?;
        }
        if self.is_optional { f.write_str(", or none") } else { Ok(()) }
    }
}

/// Type of a setting's value, with its unit.
pub trait Kind {
    /// Type of the field.
    type Value;
    /// Description of valid values.
    const INFO: ValueInfo;
    /// Parses the text form.
    fn parse(text: &str) -> Option<Self::Value>;
    /// Returns the text form. [`Kind::parse`] returns the value again.
    fn text(value: &Self::Value) -> String;
}

const fn info(
    placeholder: &'static str,
    expected: &'static str,
    example: &'static str,
    form: Form,
) -> ValueInfo {
    ValueInfo { placeholder, expected, example, form, is_optional: false }
}

macro_rules! numbers {
    ($($type:ty: $expected:literal;)*) => {$(
        impl Kind for $type {
            type Value = $type;
            const INFO: ValueInfo = info("N", $expected, "8", Form::Scalar);
            fn parse(text: &str) -> Option<$type> {
                text.parse().ok()
            }
            fn text(value: &$type) -> String {
                value.to_string()
            }
        }
    )*};
}

numbers! {
    u16: "a whole number from 0 to 65535";
    u32: "a whole number from 0 to 4294967295";
    u64: "a whole number";
    usize: "a whole number";
}

impl Kind for bool {
    type Value = bool;
    const INFO: ValueInfo = info("BOOL", "true or false", "", Form::Scalar);

    fn parse(text: &str) -> Option<bool> {
        match text {
            "true" | "1" | "on" => Some(true),
            "false" | "0" | "off" => Some(false),
            _ => None,
        }
    }

    fn text(value: &bool) -> String {
        value.to_string()
    }
}

impl Kind for String {
    type Value = String;
    const INFO: ValueInfo = info("TEXT", "a text", "", Form::Text);

    fn parse(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    fn text(value: &String) -> String {
        value.clone()
    }
}

/// An empty path is `none`.
impl Kind for PathBuf {
    type Value = PathBuf;
    const INFO: ValueInfo =
        ValueInfo { is_optional: true, ..info("PATH", "a path", "/var/lib/moontide", Form::Text) };

    fn parse(text: &str) -> Option<PathBuf> {
        Some(if text == NONE { PathBuf::new() } else { PathBuf::from(text) })
    }

    fn text(value: &PathBuf) -> String {
        if value.as_os_str().is_empty() { NONE.to_owned() } else { value.to_string_lossy().into_owned() }
    }
}

impl Kind for SocketAddr {
    type Value = SocketAddr;
    const INFO: ValueInfo =
        info("IP:PORT", "an IP address and a port", "127.0.0.1:7400 or [::1]:7400", Form::Text);

    fn parse(text: &str) -> Option<SocketAddr> {
        text.parse().ok()
    }

    fn text(value: &SocketAddr) -> String {
        value.to_string()
    }
}

/// A duration needs a unit.
impl Kind for Duration {
    type Value = Duration;
    const INFO: ValueInfo = info("TIME", "a duration", "500ms, 30s, 5m or 2h", Form::Text);

    fn parse(text: &str) -> Option<Duration> {
        let (number, unit) = split_number(text)?;
        let unit_us: u64 = match unit {
            "us" => 1,
            "ms" => 1_000,
            "s" => 1_000_000,
            "m" => 60_000_000,
            "h" => 3_600_000_000,
            "d" => 86_400_000_000,
            _ => return None,
        };
        number.checked_mul(unit_us).map(Duration::from_micros)
    }

    fn text(value: &Duration) -> String {
        let us = value.as_micros();
        let units = [(3_600_000_000, "h"), (60_000_000, "m"), (1_000_000, "s"), (1_000, "ms")];
        let whole = units.into_iter().find(|(unit, _)| us != 0 && us.is_multiple_of(*unit));
        match whole {
            Some((unit, name)) => format!("{}{name}", us / unit),
            None if us == 0 => "0s".to_owned(),
            None => format!("{us}us"),
        }
    }
}

/// 1 to 16 hexadecimal digits.
impl Kind for NodeId {
    type Value = NodeId;
    const INFO: ValueInfo = info("HEX", "1 to 16 hexadecimal digits", "14c4daf3bcb05a85", Form::Text);

    fn parse(text: &str) -> Option<NodeId> {
        let digits = text.strip_prefix("0x").unwrap_or(text);
        let is_plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_plain.then(|| u64::from_str_radix(digits, 16).ok()).flatten().map(NodeId)
    }

    fn text(value: &NodeId) -> String {
        format!("{:016x}", value.0)
    }
}

/// A number of bytes, plain or with a unit. Units are powers of 1024.
#[derive(Debug)]
pub enum Bytes {}

impl Kind for Bytes {
    type Value = u64;
    const INFO: ValueInfo = info("SIZE", "a size", "131072, 64KiB, 512MiB or 4GiB", Form::Scalar);

    fn parse(text: &str) -> Option<u64> {
        let (number, unit) = split_number(text.trim())?;
        let shift = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kib" => 10,
            "m" | "mib" => 20,
            "g" | "gib" => 30,
            "t" | "tib" => 40,
            _ => return None,
        };
        number.checked_mul(1 << shift)
    }

    fn text(value: &u64) -> String {
        let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
        let whole = units.into_iter().find(|(shift, _)| *value != 0 && value.is_multiple_of(1 << shift));
        whole.map_or_else(|| value.to_string(), |(shift, unit)| format!("{}{unit}", value >> shift))
    }
}

/// Milliseconds, for settings whose name ends with `_ms`: a plain number, or a duration with a unit.
#[derive(Debug)]
pub enum Millis {}

impl Kind for Millis {
    type Value = u32;
    const INFO: ValueInfo = info("MS", "a whole number of milliseconds", "2000 or 2s", Form::Scalar);

    fn parse(text: &str) -> Option<u32> {
        if let Ok(ms) = text.parse() {
            return Some(ms);
        }
        let duration = Duration::parse(text)?;
        let is_whole = duration.subsec_nanos() % 1_000_000 == 0;
        is_whole.then(|| u32::try_from(duration.as_millis()).ok()).flatten()
    }

    fn text(value: &u32) -> String {
        value.to_string()
    }
}

/// Names of hosts, without ports. [`is_host_name`] checks each.
#[derive(Debug)]
pub enum HostNames {}

impl Kind for HostNames {
    type Value = Vec<String>;
    const INFO: ValueInfo =
        info("NAME,…", "a list of host names", "master-0.example,moontide.example", Form::List);

    fn parse(text: &str) -> Option<Vec<String>> {
        <Vec<String>>::parse(text)
    }

    fn text(value: &Vec<String>) -> String {
        <Vec<String>>::text(value)
    }
}

/// A host name or IP address with a port. [`is_host_and_port`] checks it.
#[derive(Debug)]
pub enum HostPort {}

impl Kind for HostPort {
    type Value = String;
    const INFO: ValueInfo =
        info("HOST:PORT", "a host and a port", "master-0.example:7400 or [2001:db8::1]:7400", Form::Text);

    fn parse(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    fn text(value: &String) -> String {
        value.clone()
    }
}

/// Several of [`HostPort`], separated by commas, in one string.
#[derive(Debug)]
pub enum HostPorts {}

impl Kind for HostPorts {
    type Value = String;
    const INFO: ValueInfo = info(
        "HOST:PORT,…",
        "a host and a port, or several separated by commas",
        "master-0:7400,master-1:7400",
        Form::List,
    );

    fn parse(text: &str) -> Option<String> {
        HostPort::parse(text)
    }

    fn text(value: &String) -> String {
        value.clone()
    }
}

/// Text of a value that is not set.
const NONE: &str = "none";

impl<K: Kind> Kind for Option<K> {
    type Value = Option<K::Value>;
    const INFO: ValueInfo = ValueInfo { is_optional: true, ..K::INFO };

    fn parse(text: &str) -> Option<Option<K::Value>> {
        match text {
            "" | NONE => Some(None),
            text => K::parse(text).map(Some),
        }
    }

    fn text(value: &Option<K::Value>) -> String {
        value.as_ref().map_or_else(|| NONE.to_owned(), K::text)
    }
}

impl<K: Kind> Kind for Vec<K> {
    type Value = Vec<K::Value>;
    const INFO: ValueInfo = ValueInfo { form: Form::List, ..K::INFO };

    fn parse(text: &str) -> Option<Vec<K::Value>> {
        match text.trim() {
            "" => Some(Vec::new()),
            NONE if K::INFO.is_optional => Some(Vec::new()),
            text => text.split(',').map(|part| K::parse(part.trim())).collect(),
        }
    }

    fn text(value: &Vec<K::Value>) -> String {
        value.iter().map(K::text).collect::<Vec<_>>().join(",")
    }
}

/// Declares a kind with a name for each value of an enum.
#[macro_export]
macro_rules! choices {
    (
        $(#[doc = $doc:literal])*
        $vis:vis enum $kind:ident for $type:ty {
            $first:path => $first_name:literal
            $(, $value:path => $name:literal)* $(,)?
        }
    ) => {
        $(#[doc = $doc])*
        #[derive(Debug)]
        $vis enum $kind {}

        impl $crate::Kind for $kind {
            type Value = $type;
            const INFO: $crate::ValueInfo = $crate::ValueInfo {
                placeholder: concat!($first_name $(, "|", $name)*),
                expected: concat!("one of ", $first_name $(, ", ", $name)*),
                example: "",
                form: $crate::Form::Text,
                is_optional: false,
            };
            fn parse(text: &str) -> Option<$type> {
                match text {
                    $first_name => Some($first),
                    $($name => Some($value),)*
                    _ => None,
                }
            }
            fn text(value: &$type) -> String {
                let name = match value {
                    $first => $first_name,
                    $($value => $name,)*
                };
                name.to_owned()
            }
        }
    };
}

/// Splits text after its leading digits.
fn split_number(text: &str) -> Option<(u64, &str)> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    Some((number.parse().ok()?, unit))
}

/// Parses a size. The error names valid values.
pub fn parse_size(text: &str) -> Result<u64, String> {
    parse_or_explain::<Bytes>(text)
}

/// Parses a duration. The error names valid values.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    parse_or_explain::<Duration>(text)
}

fn parse_or_explain<K: Kind>(text: &str) -> Result<K::Value, String> {
    K::parse(text).ok_or_else(|| format!("{text:?} is not {}", K::INFO))
}

/// Returns whether this is the name of a host, without a scheme, a port or a path.
pub fn is_host_name(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    (1..=HOST_NAME_BYTES_MAX).contains(&text.len()) && text.bytes().all(is_allowed)
}

/// Whether the text is a host name or IP address and a port other than 0. IPv6 addresses are in brackets.
pub fn is_host_and_port(text: &str) -> bool {
    text.rsplit_once(':').is_some_and(|(host, port)| {
        let bare = host.strip_prefix('[').map_or(Some(host), |inner| inner.strip_suffix(']'));
        let is_host = bare.is_some_and(|bare| {
            !bare.is_empty()
                && (bare != host || !bare.contains(':'))
                && !bare.contains(|c: char| c.is_whitespace() || c == '/')
        });
        is_host && port.parse::<u16>().is_ok_and(|port| port != 0)
    })
}

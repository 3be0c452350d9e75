//! [`to_toml`]: a configuration as a TOML file with comments.

use std::fmt::Write;

use crate::declare::{Component, Setting};
use crate::kind::Form;

/// Width of the comments.
const COMMENT_WIDTH: usize = 100;

/// Formats the configuration as a file with a comment for each setting. Loading the file returns this configuration.
/// `defaults` are the defaults that the comments show.
pub fn to_toml<C: Component>(config: &C, defaults: &C) -> String {
    let mut out = format!(
        "# Settings of `{}`. Flags override the environment ({}<SETTING>), which overrides this file.\n",
        C::COMMAND,
        C::PREFIX,
    );
    let mut section = None;
    for setting in C::table() {
        if setting.section != section {
            section = setting.section;
            let _ = write!(out, "\n[{}]\n", section.unwrap_or_default());
        }
        let key = setting.key();
        let text = |config: &C| config.get(&key).unwrap_or_default();
        let default = Setting { default: text(defaults), ..setting.clone() }.shown_default();
        out.push('\n');
        let comment = std::iter::once(format!("{}.", setting.help())).chain(setting.details());
        for line in comment.flat_map(|paragraph| wrapped(&paragraph, COMMENT_WIDTH)) {
            let _ = writeln!(out, "# {line}");
        }
        let _ = writeln!(out, "# Default: {default}");
        let _ = writeln!(out, "{} = {}", setting.name, toml_value(&text(config), setting.value.form));
    }
    out
}

/// Formats the text form of a value in TOML.
fn toml_value(text: &str, form: Form) -> String {
    let is_bare = text.parse::<u64>().is_ok() || text.parse::<bool>().is_ok();
    match form {
        Form::Scalar if is_bare => text.to_owned(),
        Form::Scalar | Form::Text => toml::Value::from(text).to_string(),
        Form::List if text.is_empty() => "[]".to_owned(),
        Form::List => toml::Value::from(text.split(',').map(str::trim).collect::<Vec<_>>()).to_string(),
    }
}

/// Splits text between words into lines of at most `width` characters.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.len() + 1 + word.len() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

//! The fake driver of devices that do not exist, built for tests in Python.

use std::path::Path;

use crate::command::{Command, CommandError};
use crate::machine::Machine;

/// By which tests find it.
pub(crate) const VARIABLE: &str = "MOONTIDE_FAKE_DRIVER_LIB";

/// Builds it and returns its path.
pub(crate) fn build(root: &Path, machine: &Machine) -> Result<String, CommandError> {
    let command = Command::new("cargo", &["build", "--locked", "-p", "moontide-fakedriver"]);
    println!("$ {command}");
    command.run(root)?;
    let library = root.join(&machine.target_dir).join("debug/libmoontide_fakedriver.so");
    Ok(library.to_string_lossy().into_owned())
}

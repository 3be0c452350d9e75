//! Python interpreters of this machine, and environments made from them.
//!
//! Owns [`Interpreter`] and [`Venv`]. Environments live under the target directory; one that exists with the same
//! requirements is used again.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::command::{Command, CommandError};

/// The minor versions of Python 3 that we look for. The first is the oldest that the package supports.
const MINORS: std::ops::RangeInclusive<u32> = 11..=14;

/// Written last into an environment: what it holds. Without it the environment is made again.
const STAMP: &str = "moontide-requirements.txt";

/// A CPython that can make environments with pip in them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Interpreter {
    pub(crate) version: Version,
    pub(crate) program: String,
}

/// `3.12`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version {
    pub(crate) minor: u32,
}

/// An environment of packages.
#[derive(Debug)]
pub(crate) struct Venv {
    directory: PathBuf,
}

/// Why there is no environment.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VenvError {
    #[error("cannot prepare {path}: {source}")]
    Files { path: String, source: std::io::Error },
    #[error(transparent)]
    Command(#[from] CommandError),
}

/// What to say where no interpreter was found.
pub(crate) const NO_INTERPRETER: &str =
    "no Python of version 3.11 or later that has venv and pip (`apt install python3-venv`, or pyenv)";

impl Version {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let minor = text.strip_prefix("3.")?.parse().ok()?;
        Some(Self { minor })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "3.{}", self.minor)
    }
}

/// One interpreter for each version that is there, oldest first: on `PATH`, or else the newest that pyenv has.
pub(crate) fn interpreters(root: &Path) -> Vec<Interpreter> {
    let pyenv =
        std::env::var_os("PYENV_ROOT").filter(|path| !path.is_empty()).map(PathBuf::from).or_else(|| {
            let home = std::env::var_os("HOME")?;
            Some(Path::new(&home).join(".pyenv"))
        });
    let installed = pyenv.map(|pyenv| names(&pyenv.join("versions"))).unwrap_or_default();
    let find = |minor| {
        let version = Version { minor };
        let on_path = std::iter::once(format!("python{version}"));
        let candidates = on_path.chain(of_version(&installed, version).into_iter().rev());
        candidates.into_iter().find_map(|program| ask(root, version, &program))
    };
    MINORS.filter_map(find).collect()
}

/// Asks the program itself: a shim of pyenv may be there for a version that is not.
fn ask(root: &Path, version: Version, program: &str) -> Option<Interpreter> {
    let question = "import ensurepip, sys, sysconfig, venv; \
                    print(sys.executable, '%d.%d' % sys.version_info[:2], sysconfig.get_config_var('Py_GIL_DISABLED') or 0)";
    let answer = Command::new(program, &["-c", question]).output(root).ok()?;
    let mut words = answer.split_whitespace();
    let (program, found, without_lock) = (words.next()?, words.next()?, words.next()?);
    (Version::parse(found) == Some(version) && without_lock == "0")
        .then(|| Interpreter { version, program: program.to_owned() })
}

fn names(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

/// The programs of `version` among pyenv's folders (`…/3.12.1`), oldest first.
fn of_version(installed: &[PathBuf], version: Version) -> Vec<String> {
    let mut found: Vec<(u32, String)> = installed
        .iter()
        .filter_map(|folder| {
            let patch = folder.file_name()?.to_str()?.strip_prefix(&format!("{version}."))?.parse().ok()?;
            Some((patch, folder.join(format!("bin/python{version}")).to_str()?.to_owned()))
        })
        .collect();
    found.sort();
    found.into_iter().map(|(_, program)| program).collect()
}

impl Venv {
    /// An environment in `directory` with `requirements`, which stand there already if an earlier run made it.
    pub(crate) fn kept(
        root: &Path,
        interpreter: &Interpreter,
        directory: PathBuf,
        requirements: &[&str],
    ) -> Result<Self, VenvError> {
        let venv = Self { directory };
        let stamp = format!("{}\n{}\n", interpreter.program, requirements.join("\n"));
        let stamp_path = venv.directory.join(STAMP);
        if std::fs::read_to_string(&stamp_path).is_ok_and(|found| found == stamp) {
            return Ok(venv);
        }
        run_logged(Command::new(&interpreter.program, &["-m", "venv", "--clear", &venv.path("")]), root)?;
        venv.install(root, requirements)?;
        let files = |source| VenvError::Files { path: stamp_path.display().to_string(), source };
        std::fs::write(&stamp_path, stamp).map_err(files)?;
        Ok(venv)
    }

    /// An environment that the caller knows to be whole.
    pub(crate) fn existing(directory: PathBuf) -> Self {
        Self { directory }
    }

    /// A new environment with nothing in it, not even pip.
    pub(crate) fn empty(
        root: &Path,
        interpreter: &Interpreter,
        directory: PathBuf,
    ) -> Result<Self, VenvError> {
        let venv = Self { directory };
        let arguments = ["-m", "venv", "--clear", "--without-pip", &venv.path("")];
        run_logged(Command::new(&interpreter.program, &arguments), root)?;
        Ok(venv)
    }

    /// Installs with this environment's own pip.
    pub(crate) fn install(&self, root: &Path, what: &[&str]) -> Result<(), VenvError> {
        self.install_into(self, root, what)
    }

    /// Installs into `other` with this environment's pip.
    pub(crate) fn install_into(&self, other: &Self, root: &Path, what: &[&str]) -> Result<(), VenvError> {
        let python = other.path("bin/python");
        let mut arguments =
            vec!["-m", "pip", "--python", &python, "--disable-pip-version-check", "install", "--quiet"];
        arguments.extend(what);
        run_logged(Command::new(&self.path("bin/python"), &arguments), root)
    }

    pub(crate) fn path(&self, inside: &str) -> String {
        self.directory.join(inside).to_string_lossy().trim_end_matches('/').to_owned()
    }
}

fn run_logged(command: Command, root: &Path) -> Result<(), VenvError> {
    println!("$ {command}");
    Ok(command.run(root)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interpreters_of_a_version_are_sorted_by_patch() {
        let folders = ["/p/3.12.1", "/p/3.12.10", "/p/3.12.9", "/p/3.1.2", "/p/pypy3.12", "/p/3.12.0rc1"];
        let folders: Vec<PathBuf> = folders.iter().map(PathBuf::from).collect();
        assert_eq!(
            of_version(&folders, Version { minor: 12 }),
            ["/p/3.12.1/bin/python3.12", "/p/3.12.9/bin/python3.12", "/p/3.12.10/bin/python3.12"]
        );
        assert!(of_version(&folders, Version { minor: 11 }).is_empty());
    }

    #[test]
    fn versions_round_trip_and_invalid_text_is_rejected() {
        for text in ["3.11", "3.12"] {
            assert_eq!(Version::parse(text).unwrap().to_string(), text);
        }
        for text in ["3", "2.7", "3.x", "3.12.1", ""] {
            assert_eq!(Version::parse(text), None, "{text}");
        }
        assert!(Version::parse("3.9") < Version::parse("3.11"));
    }
}

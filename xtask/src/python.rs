//! `cargo xtask python`: installs the built wheels into new environments and runs the tests of the package there.
//!
//! Owns what is checked after installation, and with which interpreters. Building the wheels is [`crate::wheel`].
//!
//! Invariants: tests see the package as installed, never the sources beside them. An environment is new each time, and
//! holds nothing but our wheels until they were seen to work that way, with no variable of the caller set.

use std::io;
use std::path::Path;

use crate::command::{Command, CommandError};
use crate::fakedriver;
use crate::machine::Machine;
use crate::retries::{self, StallMonitor};
use crate::venv::{self, Interpreter, Venv, VenvError, Version};
use crate::wheel::{self, WheelError, Wheels};

/// Without `--python`: the oldest that the package supports, and the one that inference engines use most.
const VERSIONS: &[Version] = &[Version { minor: 11 }, Version { minor: 12 }];

/// For a whole run of pytest; single tests have their own limit.
const TIME_MAX: &str = "900";

/// Names the file to which `python/tests/ci_failures.py` writes when failed tests ran.
const FAILURES_VARIABLE: &str = "MOONTIDE_FAILURES";

/// `pip install torch` would bring 3 GB of libraries for GPUs, so its dependencies are named here. Triton compiles for
/// GPUs, and interprets kernels, on any machine. The versions are those of the end-to-end tests.
const TORCH: &[&str] = &["torch==2.13.0", "triton==3.7.1"];
const TORCH_DEPENDENCIES: &[&str] =
    &["filelock", "fsspec", "jinja2", "networkx", "setuptools<81", "sympy", "typing-extensions"];

/// What was asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Options {
    /// Instead of `wheels` under the target directory.
    pub(crate) wheel_dir: Option<String>,
    /// Instead of those of [`VERSIONS`] that are there.
    pub(crate) versions: Vec<Version>,
    /// Every test on every interpreter; of the kernels the long form.
    pub(crate) full: bool,
    /// The tests that need torch or Triton, and only those.
    pub(crate) torch: bool,
}

/// Why the package does not work as installed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PythonError {
    #[error("cannot test the package: {}", venv::NO_INTERPRETER)]
    NoInterpreter,
    #[error("there is no Python {0} here with venv and pip")]
    Missing(Version),
    #[error(transparent)]
    Wheel(#[from] WheelError),
    #[error(transparent)]
    Venv(#[from] VenvError),
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error("{file} was loaded with libraries that are not part of glibc: {}", .libraries.join(", "))]
    Libraries { file: String, libraries: Vec<String> },
    #[error("cannot use {path}: {source}")]
    Files { path: String, source: io::Error },
}

/// Which tests an interpreter runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Suite {
    Full,
    Smoke,
}

/// Installs and tests.
pub(crate) fn run(root: &Path, machine: &Machine, options: &Options) -> Result<(), PythonError> {
    let directory = options.wheel_dir.as_ref().map_or_else(
        || Wheels::default_directory(root, machine),
        |named| std::env::current_dir().unwrap_or_else(|_| root.to_owned()).join(named),
    );
    let wheels = Wheels::in_directory(&directory)?;
    let tools = wheel::tools(root, machine)?;
    let chosen = chosen(&machine.interpreters, options)?;
    let scratch = root.join(&machine.target_dir).join("python");
    for version in VERSIONS.iter().filter(|_| options.versions.is_empty()) {
        if !chosen.iter().any(|(interpreter, _)| interpreter.version == *version) {
            println!("NOTE: no Python {version} here; nothing is tested with it");
        }
    }

    let driver = fakedriver::build(root, machine)?;
    if options.torch {
        let (interpreter, _) = chosen.last().ok_or(PythonError::NoInterpreter)?;
        let venv = torch_venv(root, &scratch, &tools, &wheels, interpreter)?;
        pytest(root, &scratch, &venv, "-m torch python/tests", &driver)?;
        return pytest(root, &scratch, &venv, &kernel_tests(options), &driver);
    }
    for (interpreter, suite) in &chosen {
        println!("\n-- Python {}", interpreter.version);
        let venv = Venv::empty(root, interpreter, scratch.join(format!("test-{}", interpreter.version)))?;
        let files = [wheels.moontide.to_string_lossy(), wheels.compat.to_string_lossy()];
        tools.install_into(&venv, root, &["--no-index", &files[0], &files[1]])?;
        check_installed(root, &scratch, &venv)?;

        tools.install_into(&venv, root, &["-r", "python/tests/requirements.txt"])?;
        if *suite == Suite::Full && interpreter.version >= TYPES_FROM {
            check_types(root, &scratch, &venv)?;
        }
        let marks = if *suite == Suite::Full { "not torch" } else { "smoke and not torch" };
        pytest(root, &scratch, &venv, &format!("-m '{marks}' python/tests"), &driver)?;
    }
    Ok(())
}

/// The requirements of our tests have mypy from here on.
const TYPES_FROM: Version = Version { minor: 12 };

/// The interpreters to use and what each runs: everything on the newest, the rest of them look whether it works at all.
fn chosen<'a>(
    interpreters: &'a [Interpreter],
    options: &Options,
) -> Result<Vec<(&'a Interpreter, Suite)>, PythonError> {
    let find = |version: &Version| interpreters.iter().find(|python| python.version == *version);
    let mut found: Vec<&Interpreter> = if options.versions.is_empty() {
        VERSIONS.iter().filter_map(find).collect()
    } else {
        let wanted = options.versions.iter();
        wanted.map(|version| find(version).ok_or(PythonError::Missing(*version))).collect::<Result<_, _>>()?
    };
    if found.is_empty() {
        found.push(interpreters.first().ok_or(PythonError::NoInterpreter)?);
    }
    found.sort_by_key(|python| python.version);
    let last = found.len() - 1;
    let suite = |number| if options.full || number == last { Suite::Full } else { Suite::Smoke };
    Ok(found.into_iter().enumerate().map(|(number, python)| (python, suite(number))).collect())
}

/// Nothing but our wheels is there, and no variable of the caller: the program runs, the module loads, and neither
/// takes a library from this machine that another might not have.
fn check_installed(root: &Path, scratch: &Path, venv: &Venv) -> Result<(), PythonError> {
    let python = venv.path("bin/python");
    let clean = |arguments: &[&str]| clean(scratch, venv, arguments);
    // Away from the checkout, whose folder `python` must not be on the module path, and from the variables of this process.
    run_logged(root, &clean(&[&venv.path("bin/moontide"), "--version"]))?;
    run_logged(root, &clean(&[&python, "-m", "moontide", "doctor"]))?;
    run_logged(
        root,
        &clean(&[&python, "-c", "import moontide; print(moontide.__version__, moontide.__file__)"]),
    )?;
    run_logged(root, &clean(&[&python, "-c", "import mooncake; print(mooncake.__file__)"]))?;

    let where_from = "import moontide._native as n; print(n.__file__, moontide.binary())";
    let code = format!("import moontide; {where_from}");
    for file in clean(&[&python, "-c", &code]).output(root)?.split_whitespace() {
        let listing = Command::new("ldd", &[file]).output(root)?;
        let libraries = foreign(&listing);
        if !libraries.is_empty() {
            return Err(PythonError::Libraries { file: file.to_owned(), libraries });
        }
    }
    Ok(())
}

/// A command with an environment of two variables.
fn clean(scratch: &Path, venv: &Venv, arguments: &[&str]) -> Command {
    let path = format!("PATH={}:/usr/bin:/bin", venv.path("bin"));
    let home = format!("HOME={}", scratch.display());
    let mut words = vec!["-i", &path, &home];
    words.extend(arguments);
    Command::new("env", &words)
}

/// Libraries in what `ldd` prints that another machine need not have, or that this one has not.
fn foreign(listing: &str) -> Vec<String> {
    let names = listing.lines().filter_map(|line| {
        let name = line.split_whitespace().next()?;
        let file = name.rsplit('/').next()?;
        let missing = line.contains("not found");
        (missing || !(file.starts_with("linux-vdso") || wheel::is_everywhere(file))).then(|| name.to_owned())
    });
    names.collect()
}

/// What the stub says about the extension, against the extension.
fn check_types(root: &Path, scratch: &Path, venv: &Venv) -> Result<(), PythonError> {
    let cache = scratch.join("mypy").to_string_lossy().into_owned();
    let stubtest = ["-m", "mypy.stubtest", "moontide._native"];
    run_logged(root, &Command::new(&venv.path("bin/python"), &stubtest).env("MYPY_CACHE_DIR", &cache))
}

/// Runs the tests that `selection` names in words of pytest's command line. Tests that failed while the machine stalled
/// run once more.
fn pytest(
    root: &Path,
    scratch: &Path,
    venv: &Venv,
    selection: &str,
    driver: &str,
) -> Result<(), PythonError> {
    let (bin, cache, failures) = (venv.path("bin"), scratch.join("pytest"), scratch.join("failures.txt"));
    // `moontide` in a test is the installed one. Nothing is written beside the sources.
    let run = |which: &str| {
        let line = format!(
            "PATH='{bin}':$PATH exec timeout {TIME_MAX} pytest -q {which}-o cache_dir='{}' {selection}",
            cache.display()
        );
        let command = Command::new("sh", &["-c", &line]).env("PYTHONDONTWRITEBYTECODE", "1");
        let command = command.env(FAILURES_VARIABLE, &failures.to_string_lossy());
        run_logged(root, &command.env(fakedriver::VARIABLE, driver))
    };
    // The failures of an earlier run must not be taken for those of this one.
    let _ = std::fs::remove_file(&failures);
    let monitor = StallMonitor::start();
    let result = run("");
    let stalls = monitor.finish();
    println!("stalls of the machine: {}", stalls.len());
    let Err(error) = result else { return Ok(()) };
    let failed = std::fs::read_to_string(&failures).unwrap_or_default();
    let Some(tests) = retries::stalled_tests(&failed, &stalls) else { return Err(error) };
    println!("failures during a stall, retried: {}", tests.len());
    for test in tests {
        println!("  {test}");
    }
    run("--last-failed ")
}

/// The tests of the kernels; those of the short form take two minutes.
fn kernel_tests(options: &Options) -> String {
    let marks = if options.full { "" } else { "-m short " };
    format!("{marks}python/e2e/test_kernels.py python/e2e/test_nano_kernels.py")
}

/// Torch is large: its environment stays, and only our wheels in it are new.
fn torch_venv(
    root: &Path,
    scratch: &Path,
    tools: &Venv,
    wheels: &Wheels,
    interpreter: &Interpreter,
) -> Result<Venv, PythonError> {
    let directory = scratch.join(format!("torch-{}", interpreter.version));
    let ready = directory.join("torch-is-ready.txt");
    let requirements_path = root.join("python/tests/requirements.txt");
    let requirements =
        std::fs::read_to_string(&requirements_path).map_err(|source| files(&requirements_path, source))?;
    let stamp = format!("{}\n{}\n{requirements}", interpreter.program, TORCH.join("\n"));
    let venv = if std::fs::read_to_string(&ready).is_ok_and(|found| found == stamp) {
        Venv::existing(directory)
    } else {
        let venv = Venv::empty(root, interpreter, directory)?;
        let others = [&["-r", "python/tests/requirements.txt"], TORCH_DEPENDENCIES].concat();
        tools.install_into(&venv, root, &others)?;
        tools.install_into(&venv, root, &[&["--no-deps"], TORCH].concat())?;
        run_logged(root, &Command::new(&venv.path("bin/python"), &["python/tests/torch_without_cuda.py"]))?;
        std::fs::write(&ready, &stamp).map_err(|source| files(&ready, source))?;
        venv
    };
    let ours = [wheels.moontide.to_string_lossy(), wheels.compat.to_string_lossy()];
    let again = ["--no-index", "--force-reinstall", "--no-deps", &ours[0], &ours[1]];
    tools.install_into(&venv, root, &again)?;
    Ok(venv)
}

fn run_logged(root: &Path, command: &Command) -> Result<(), PythonError> {
    println!("$ {command}");
    Ok(command.run(root)?)
}

fn files(path: &Path, source: io::Error) -> PythonError {
    PythonError::Files { path: path.display().to_string(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pythons(minors: &[u32]) -> Vec<Interpreter> {
        let python = |minor: &u32| Interpreter {
            version: Version { minor: *minor },
            program: format!("/usr/bin/python3.{minor}"),
        };
        minors.iter().map(python).collect()
    }

    fn check(there: &[u32], options: &Options, expected: Option<&[(u32, Suite)]>) {
        let there = pythons(there);
        let found = chosen(&there, options).ok();
        let found: Option<Vec<(u32, Suite)>> =
            found.map(|all| all.iter().map(|(python, suite)| (python.version.minor, *suite)).collect());
        assert_eq!(found.as_deref(), expected);
    }

    #[test]
    fn newest_supported_python_runs_full_suite_and_others_smoke() {
        let plain = Options::default();
        check(&[11, 12, 13], &plain, Some(&[(11, Suite::Smoke), (12, Suite::Full)]));
        check(&[11], &plain, Some(&[(11, Suite::Full)]));
        check(&[13, 14], &plain, Some(&[(13, Suite::Full)]));
        check(&[], &plain, None);

        let full = Options { full: true, ..Options::default() };
        check(&[11, 12], &full, Some(&[(11, Suite::Full), (12, Suite::Full)]));

        let named = Options { versions: vec![Version { minor: 13 }], ..Options::default() };
        check(&[11, 12, 13], &named, Some(&[(13, Suite::Full)]));
        check(&[11, 12], &named, None);
    }

    #[test]
    fn torch_and_triton_versions_are_those_of_end_to_end_tests() {
        let pinned: Vec<&str> = include_str!("../../python/e2e/requirements.txt").lines().collect();
        for package in TORCH {
            assert!(pinned.contains(package), "{package}");
        }
    }

    #[test]
    fn only_short_kernel_tests_run_by_default() {
        let files = "python/e2e/test_kernels.py python/e2e/test_nano_kernels.py";
        assert_eq!(kernel_tests(&Options::default()), format!("-m short {files}"));
        assert_eq!(kernel_tests(&Options { full: true, ..Options::default() }), files);
    }

    #[test]
    fn libraries_outside_base_system_are_listed() {
        let listing = "\tlinux-vdso.so.1 (0x00007ffd)\n\
                       \tlibm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x00007f)\n\
                       \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                       \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        assert!(foreign(listing).is_empty());
        let more = format!("{listing}\tlibssl.so.3 => /lib/libssl.so.3 (0x1)\n\tlibdl.so.2 => not found\n");
        assert_eq!(foreign(&more), ["libssl.so.3", "libdl.so.2"]);
    }
}

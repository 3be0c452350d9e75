//! `cargo xtask wheel`: the two distributions that people install with pip, built and looked at.
//!
//! Owns how they are built and what they may ask of a system. `moontide` holds the extension and the program; the
//! second one holds a package of Python only. Installing and testing them is [`crate::python`].
//!
//! One release build serves everything: the ordinary build compiles, and only the last link of the program and of the
//! extension goes through zig, which has the symbols of any glibc. What the linker is, is an argument of the last crate
//! alone (`cargo rustc -- -C linker`), so that the crates below are those of `cargo build --release`.
//!
//! Invariants: what ships needs no glibc newer than [`GLIBC_MAX`] and no library that a system with CPython might not
//! have; that is read from the files in the finished wheel. The checkout is written to in one place that git ignores:
//! `python/moontide/bin`.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::command::{Command, CommandError};
use crate::elf::{ElfError, ElfRequirements, Glibc};
use crate::machine::Machine;
use crate::venv::{self, Interpreter, Venv, VenvError};

/// What an environment that builds wheels holds. Zig comes as a package, so that nothing has to be installed.
pub(crate) const TOOLS: &[&str] = &["maturin==1.16.0", "setuptools==80.9.0", "ziglang==0.17.0"];

/// The oldest glibc that we promise to run on: that of RHEL 8 and everything later.
const GLIBC_MAX: Glibc = Glibc(2, 28);
/// Parts of glibc.
const LIBRARIES: &[&str] = &["libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"];
/// The loader itself, whose name has the architecture in it.
const LOADER: &str = "ld-linux-";
/// The unwinder of a process. The program has its own, linked in. The extension must share that of the interpreter: a
/// daemon thread that is ended when the interpreter ends is unwound by this one through our frames, and two unwinders do
/// not understand each other's state. Every system that can run CPython has it.
const UNWINDER: &str = "libgcc_s.so.1";
/// Size limit of a wheel: half as large again as a wheel built without size optimisations. A wheel beyond it contains
/// something that does not belong there.
const SIZE_MAX: u64 = 24 << 20;

/// Where wheels go, under the target directory.
const OUT: &str = "wheels";

/// What was asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Options {
    /// With the machine's own linker: for this machine only.
    pub(crate) plain: bool,
    /// Instead of `wheels` under the target directory.
    pub(crate) out: Option<String>,
    /// Also compile the extension for an interpreter without the global lock.
    pub(crate) free_threaded: bool,
}

/// Why there is no wheel, or none to ship.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WheelError {
    #[error("cannot build wheels: {}", venv::NO_INTERPRETER)]
    NoInterpreter,
    #[error(transparent)]
    Venv(#[from] VenvError),
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error("cannot use {path}: {source}")]
    Files { path: String, source: io::Error },
    #[error("{path} in the wheel: {source}")]
    Elf { path: String, source: ElfError },
    #[error("{directory} should hold one wheel of {name}, and holds {found} (`cargo xtask wheel` builds it)")]
    Count { directory: String, name: &'static str, found: usize },
    #[error("these wheels must not ship:{}", .0.iter().map(|problem| format!("\n    {problem}")).collect::<String>())]
    Problems(Vec<String>),
}

/// The wheels in a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wheels {
    pub(crate) moontide: PathBuf,
    pub(crate) compat: PathBuf,
}

/// Builds both, looks at them, and says how long each part took.
pub(crate) fn run(root: &Path, machine: &Machine, options: &Options) -> Result<Wheels, WheelError> {
    let scratch = root.join(&machine.target_dir).join("python");
    let out = options.out.as_ref().map_or_else(
        || root.join(&machine.target_dir).join(OUT),
        |out| std::env::current_dir().unwrap_or_else(|_| root.to_owned()).join(out),
    );
    let mut clock = Clock::new();

    let tools = tools(root, machine)?;
    clock.lap("tools");

    let linkers = if options.plain { None } else { Some(Linkers::write(root, &scratch, &tools)?) };
    if let Some(note) = rebuilt(root)? {
        println!("NOTE: {note}");
    }
    build_program(root, machine, linkers.as_ref().map(|linkers| linkers.program.as_str()))?;
    clock.lap("program");

    remove_wheels(&out)?;
    run_logged(root, maturin(&tools, linkers.as_ref().map(|linkers| linkers.extension.as_str()), &out))?;
    clock.lap("extension");

    build_compat(root, &scratch, &tools, &out)?;
    clock.lap("second wheel");

    let wheels = Wheels::in_directory(&out)?;
    let problems = inspect(root, &scratch, &tools, &wheels, options.plain)?;
    clock.lap("inspection");

    if options.free_threaded {
        check_free_threaded(root, &scratch)?;
        clock.lap("free-threaded");
    }
    clock.print();
    if problems.is_empty() { Ok(wheels) } else { Err(WheelError::Problems(problems)) }
}

/// The environment with pip, maturin and zig.
pub(crate) fn tools(root: &Path, machine: &Machine) -> Result<Venv, WheelError> {
    let interpreter = builder(&machine.interpreters).ok_or(WheelError::NoInterpreter)?;
    let directory = root.join(&machine.target_dir).join("python/build");
    Ok(Venv::kept(root, interpreter, directory, TOOLS)?)
}

/// Any will do; one of those that tests use anyway is more likely to be in order than the newest.
fn builder(interpreters: &[Interpreter]) -> Option<&Interpreter> {
    interpreters.iter().find(|python| python.version.minor == 12).or(interpreters.first())
}

impl Wheels {
    /// Finds them; `directory` holds one of each.
    pub(crate) fn in_directory(directory: &Path) -> Result<Self, WheelError> {
        let files = wheel_files(directory)?;
        let one = |name: &'static str, prefix: &str| match files
            .iter()
            .filter(|path| file_name(path).starts_with(prefix))
            .collect::<Vec<_>>()
            .as_slice()
        {
            [path] => Ok((*path).clone()),
            found => Err(WheelError::Count {
                directory: directory.display().to_string(),
                name,
                found: found.len(),
            }),
        };
        Ok(Self {
            moontide: one("moontide", "moontide-")?,
            compat: one("moontide-mooncake-compat", "moontide_mooncake_compat-")?,
        })
    }

    /// Where a run without `--out` puts them.
    pub(crate) fn default_directory(root: &Path, machine: &Machine) -> PathBuf {
        root.join(&machine.target_dir).join(OUT)
    }
}

/// Scripts that rustc can call as a linker. It is maturin that knows which of rustc's arguments zig does not take.
struct Linkers {
    program: String,
    extension: String,
}

impl Linkers {
    fn write(root: &Path, scratch: &Path, tools: &Venv) -> Result<Self, WheelError> {
        let question = format!("-print-file-name={UNWINDER}");
        let unwinder = Command::new("cc", &[&question]).output(root)?;
        let (bin, cache) = (tools.path("bin"), scratch.join("zig"));
        let write = |name: &str, first: &str| {
            let path = scratch.join(name);
            let script = linker_script(&bin, &cache.to_string_lossy(), first);
            write_program(&path, &script).map_err(|source| files(&path, source))?;
            Ok::<_, WheelError>(path.to_string_lossy().into_owned())
        };
        Ok(Self { program: write("zig-cc", "")?, extension: write("zig-cc-extension", unwinder.trim())? })
    }
}

/// What zig and maturin keep between links stays under the target directory too. `first` stands before everything that
/// rustc names, so that symbols are found there first.
fn linker_script(bin: &str, cache: &str, first: &str) -> String {
    let target = format!("{}-linux-gnu.{GLIBC_MAX}", std::env::consts::ARCH);
    format!(
        "#!/bin/sh\n\
         export PATH='{bin}':\"$PATH\" ZIG_GLOBAL_CACHE_DIR='{cache}' ZIG_LOCAL_CACHE_DIR='{cache}' \
         CARGO_ZIGBUILD_CACHE_DIR='{cache}'\n\
         exec maturin zig cc -- -target {target} {first} \"$@\"\n"
    )
}

/// Only if it differs: a script that a linker is running must not change.
fn write_program(path: &Path, text: &str) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;

    if std::fs::read_to_string(path).is_ok_and(|found| found == text) {
        return Ok(());
    }
    std::fs::write(path, text)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))
}

/// Arguments for the last crate of a build.
fn link_arguments(linker: Option<&str>) -> Vec<String> {
    let linker = linker.map(|linker| format!("-Clinker={linker}"));
    linker.into_iter().chain(["-Cstrip=symbols".to_owned()]).collect()
}

/// Builds `moontide` and puts it where the package has it.
fn build_program(root: &Path, machine: &Machine, linker: Option<&str>) -> Result<(), WheelError> {
    let mut words = vec!["rustc", "--release", "--locked", "-p", "moontide-cli", "--bin", "moontide", "--"];
    let arguments = link_arguments(linker);
    words.extend(arguments.iter().map(String::as_str));
    run_logged(root, Command::new("cargo", &words))?;

    let built = root.join(&machine.target_dir).join("release/moontide");
    let shipped = root.join("python/moontide/bin/moontide");
    let copy = || {
        std::fs::create_dir_all(root.join("python/moontide/bin"))?;
        // A running program cannot be written to, but can be replaced.
        let fresh = shipped.with_extension("new");
        std::fs::copy(&built, &fresh)?;
        std::fs::rename(&fresh, &shipped)
    };
    copy().map_err(|source| files(&shipped, source))
}

fn maturin(tools: &Venv, linker: Option<&str>, out: &Path) -> Command {
    let (out, python) = (out.to_string_lossy(), tools.path("bin/python"));
    let tag = if linker.is_some() {
        format!("manylinux_{}_{}", GLIBC_MAX.0, GLIBC_MAX.1)
    } else {
        "linux".to_owned()
    };
    let mut words = vec!["build", "--release", "--locked", "--manifest-path", "python/Cargo.toml"];
    words.extend(["--compatibility", &tag, "--interpreter", &python, "--out", &out]);
    words.extend(["--compression-level", "9", "--"]);
    let arguments = link_arguments(linker);
    words.extend(arguments.iter().map(String::as_str));
    Command::new(&tools.path("bin/maturin"), &words)
}

/// From a copy: setuptools leaves its traces beside the sources.
fn build_compat(root: &Path, scratch: &Path, tools: &Venv, out: &Path) -> Result<(), WheelError> {
    let copy = scratch.join("compat");
    if copy.exists() {
        std::fs::remove_dir_all(&copy).map_err(|source| files(&copy, source))?;
    }
    copy_directory(&root.join("python/compat"), &copy).map_err(|source| files(&copy, source))?;
    let (python, out, copy) = (tools.path("bin/python"), out.to_string_lossy(), copy.to_string_lossy());
    let options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"];
    let mut words = vec!["-m", "pip", "--disable-pip-version-check", "wheel"];
    words.extend(options);
    words.extend(["--wheel-dir", &out, &copy]);
    run_logged(root, Command::new(&python, &words))
}

/// Sizes, and what the machine code in the wheels asks for. Returns what is wrong.
fn inspect(
    root: &Path,
    scratch: &Path,
    tools: &Venv,
    wheels: &Wheels,
    plain: bool,
) -> Result<Vec<String>, WheelError> {
    let mut problems = Vec::new();
    println!("\n{:<64} {:>10}  needs", "file", "bytes");
    for wheel in [&wheels.moontide, &wheels.compat] {
        let name = file_name(wheel);
        let bytes = std::fs::metadata(wheel).map_err(|source| files(wheel, source))?.len();
        println!("{name:<64} {bytes:>10}");
        if bytes > SIZE_MAX {
            problems.push(format!("{name} has {bytes} bytes; at most {SIZE_MAX} are meant"));
        }
        let unpacked = scratch.join("unpacked");
        if unpacked.exists() {
            std::fs::remove_dir_all(&unpacked).map_err(|source| files(&unpacked, source))?;
        }
        let (wheel, target) = (wheel.to_string_lossy(), unpacked.to_string_lossy());
        Command::new(&tools.path("bin/python"), &["-m", "zipfile", "-e", &wheel, &target]).run(root)?;

        let mut code = 0;
        for path in all_files(&unpacked).map_err(|source| files(&unpacked, source))? {
            let file = std::fs::read(&path).map_err(|source| files(&path, source))?;
            if !file.starts_with(b"\x7fELF") {
                continue;
            }
            code += 1;
            let name = path.strip_prefix(&unpacked).unwrap_or(&path).display().to_string();
            let needs = ElfRequirements::of(&file)
                .map_err(|source| WheelError::Elf { path: name.clone(), source })?;
            let glibc = needs.glibc().map_or_else(|| "no glibc".to_owned(), |glibc| format!("glibc {glibc}"));
            println!("  {name:<62} {:>10}  {glibc}; {}", file.len(), needs.libraries.join(" "));
            if !plain {
                problems.extend(refused(&name, &needs));
            }
        }
        let expected = if *wheel == *wheels.moontide.to_string_lossy() { 2 } else { 0 };
        if code != expected {
            problems.push(format!("{name} holds {code} files of machine code, not {expected}"));
        }
    }
    Ok(problems)
}

/// Whether `library`, a name without a folder, is wherever CPython and glibc are.
pub(crate) fn is_everywhere(library: &str) -> bool {
    LIBRARIES.contains(&library) || library.starts_with(LOADER) || library == UNWINDER
}

/// What a file asks for that a system need not have.
fn refused(name: &str, needs: &ElfRequirements) -> Vec<String> {
    let mut problems = Vec::new();
    if let Some(glibc) = needs.glibc().filter(|glibc| *glibc > GLIBC_MAX) {
        problems.push(format!("{name} needs glibc {glibc}; {GLIBC_MAX} is what we promise"));
    }
    if needs.versions.iter().any(|version| version == "GLIBC_PRIVATE") {
        problems.push(format!("{name} uses what is private to one version of glibc"));
    }
    for library in &needs.libraries {
        if !is_everywhere(library) {
            problems.push(format!("{name} needs {library}, which is not a part of glibc"));
        }
    }
    if name.ends_with(".so") && !needs.libraries.iter().any(|library| library == UNWINDER) {
        problems.push(format!("{name} has an unwinder of its own, not {UNWINDER}"));
    }
    if needs.executable_stack {
        problems.push(format!("{name} wants an executable stack"));
    }
    if needs.symbols {
        problems.push(format!("{name} is not stripped"));
    }
    problems
}

/// Dependencies that the program and the extension share, but with different features: cargo builds those, and
/// everything above them, twice.
fn rebuilt(root: &Path) -> Result<Option<String>, WheelError> {
    let tree = |package| {
        let line = format!("tree -p {package} --edges normal --prefix none --locked --format {{p}}|{{f}}");
        Command::cargo(&line).output(root)
    };
    let different = differing(&tree("moontide-cli")?, &tree("moontide-python")?);
    Ok((!different.is_empty()).then(|| {
        format!(
            "the release build does not serve the extension: other features of {} (python/Cargo.toml)",
            different.join(", ")
        )
    }))
}

/// Packages that stand in both listings (`name version|features`, one a line), not with the same features.
fn differing(one: &str, other: &str) -> Vec<String> {
    let features = |listing: &str| -> BTreeMap<String, BTreeSet<String>> {
        let lines = listing.lines().filter_map(|line| line.trim_end_matches(" (*)").split_once('|'));
        let mut packages = BTreeMap::new();
        for (package, features) in lines {
            let known: &mut BTreeSet<String> = packages.entry(package.to_owned()).or_default();
            known.extend(features.split(',').map(str::to_owned));
        }
        packages
    };
    let (one, other) = (features(one), features(other));
    let shared = one.iter().filter(|(package, features)| other.get(*package).is_some_and(|o| o != *features));
    shared.map(|(package, _)| package.clone()).collect()
}

/// What pyo3 would find in an interpreter without the global lock. Compiling needs no such interpreter.
const FREE_THREADED: &str = "\
implementation=CPython
version=3.14
shared=true
build_flags=Py_GIL_DISABLED
suppress_build_script_link_lines=true
";

fn check_free_threaded(root: &Path, scratch: &Path) -> Result<(), WheelError> {
    let path = scratch.join("free-threaded.txt");
    std::fs::write(&path, FREE_THREADED).map_err(|source| files(&path, source))?;
    let check = Command::cargo("check --locked -p moontide-python");
    run_logged(root, check.env("PYO3_CONFIG_FILE", &path.to_string_lossy()))
}

/// How long the parts took.
struct Clock {
    start: Instant,
    laps: Vec<(&'static str, f64)>,
}

impl Clock {
    fn new() -> Self {
        Self { start: Instant::now(), laps: Vec::new() }
    }

    fn lap(&mut self, name: &'static str) {
        let before: f64 = self.laps.iter().map(|(_, seconds)| seconds).sum();
        self.laps.push((name, self.start.elapsed().as_secs_f64() - before));
    }

    fn print(&self) {
        let laps = self.laps.iter().map(|(name, seconds)| format!("{name} {seconds:.1}"));
        println!("\nseconds: {}", laps.collect::<Vec<_>>().join(" · "));
    }
}

fn run_logged(root: &Path, command: Command) -> Result<(), WheelError> {
    println!("$ {command}");
    Ok(command.run(root)?)
}

fn files(path: &Path, source: io::Error) -> WheelError {
    WheelError::Files { path: path.display().to_string(), source }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn wheel_files(directory: &Path) -> Result<Vec<PathBuf>, WheelError> {
    let all = if directory.is_dir() { all_files(directory) } else { Ok(Vec::new()) };
    let all = all.map_err(|source| files(directory, source))?;
    Ok(all.into_iter().filter(|path| path.extension().is_some_and(|end| end == "whl")).collect())
}

/// Wheels of earlier versions of ours; nothing else that may lie in `out`.
fn remove_wheels(out: &Path) -> Result<(), WheelError> {
    for path in wheel_files(out)? {
        if file_name(&path).starts_with("moontide") {
            std::fs::remove_file(&path).map_err(|source| files(&path, source))?;
        }
    }
    Ok(())
}

/// Every file under `directory`, sorted.
fn all_files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(all_files(&path)?);
        } else {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn copy_directory(source: &Path, target: &Path) -> io::Result<()> {
    for path in all_files(source)? {
        let inside = path.strip_prefix(source).map_err(io::Error::other)?;
        let copy = target.join(inside);
        copy.parent().map_or(Ok(()), std::fs::create_dir_all)?;
        std::fs::copy(&path, &copy)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needs(libraries: &[&str], versions: &[&str]) -> ElfRequirements {
        let owned = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect();
        ElfRequirements {
            libraries: owned(libraries),
            versions: owned(versions),
            executable_stack: false,
            symbols: false,
        }
    }

    #[test]
    fn non_portable_binary_is_rejected_with_reason() {
        let check = |needs: &ElfRequirements, expected: &[&str]| {
            let problems = refused("x", needs);
            assert_eq!(problems.len(), expected.len(), "{problems:?}");
            for (problem, word) in problems.iter().zip(expected) {
                assert!(problem.contains(word), "{problem} does not say {word}");
            }
        };
        let good = needs(&["libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"], &["GLIBC_2.2.5", "GLIBC_2.28"]);
        check(&good, &[]);
        check(&needs(&["libc.so.6"], &["GLIBC_2.34"]), &["2.34"]);
        check(&needs(&["libc.so.6"], &["GLIBC_PRIVATE"]), &["private"]);
        check(&needs(&["libgcc_s.so.1", "libssl.so.3"], &[]), &["libssl"]);
        check(&ElfRequirements { executable_stack: true, ..good.clone() }, &["executable stack"]);
        check(&ElfRequirements { symbols: true, ..good.clone() }, &["stripped"]);

        // Failure: a program with a daemon thread in a call crashed when it ended. Cause: zig had linked its own unwinder
        // into the extension. Fix: it shares the interpreter's.
        assert!(refused("x.abi3.so", &good)[0].contains("unwinder"));
        assert!(refused("x.abi3.so", &needs(&["libgcc_s.so.1", "libc.so.6"], &[])).is_empty());
    }

    #[test]
    fn differing_features_are_listed_once_per_package() {
        let cli = "moontide-cli v0.1.0 (/x)|\nrustix v1.1.6|fs,net,termios\ntokio v1.54.0|net\nclap v4.5.0|std (*)\n";
        let python =
            "moontide-python v0.1.0 (/x)|\nrustix v1.1.6|fs,net\ntokio v1.54.0|net (*)\npyo3 v0.30.0|abi3\n";
        assert_eq!(differing(cli, python), ["rustix v1.1.6"]);
        assert!(differing(cli, cli).is_empty());
    }

    #[test]
    fn directory_must_contain_one_wheel_of_each_package() {
        let directory = std::env::temp_dir().join(format!("moontide-xtask-wheels-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let touch = |name: &str| std::fs::write(directory.join(name), b"").unwrap();
        touch("moontide-0.1.0-cp311-abi3-manylinux_2_28_x86_64.whl");
        touch("numpy-2.3.5-cp312-cp312-linux.whl");
        assert!(matches!(Wheels::in_directory(&directory), Err(WheelError::Count { found: 0, .. })));
        touch("moontide_mooncake_compat-0.1.0-py3-none-any.whl");
        let wheels = Wheels::in_directory(&directory).unwrap();
        assert!(wheels.moontide.ends_with("moontide-0.1.0-cp311-abi3-manylinux_2_28_x86_64.whl"));
        touch("moontide-0.0.9-cp311-abi3-manylinux_2_28_x86_64.whl");
        assert!(matches!(Wheels::in_directory(&directory), Err(WheelError::Count { found: 2, .. })));

        remove_wheels(&directory).unwrap();
        assert_eq!(wheel_files(&directory).unwrap().len(), 1);
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn linker_script_sets_glibc_version_and_cache_directory() {
        let script = linker_script("/t/build/bin", "/t/zig", "/lib/first.so");
        assert!(script.contains("-linux-gnu.2.28 /lib/first.so \"$@\"\n"), "{script}");
        assert!(script.contains("PATH='/t/build/bin':\"$PATH\" ZIG_GLOBAL_CACHE_DIR='/t/zig' "), "{script}");
    }

    #[test]
    fn link_arguments_set_linker_and_strip_symbols() {
        assert_eq!(link_arguments(Some("/t/zig-cc")), ["-Clinker=/t/zig-cc", "-Cstrip=symbols"]);
        assert_eq!(link_arguments(None), ["-Cstrip=symbols"]);
    }
}

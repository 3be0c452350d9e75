//! The command of the simulation; [`command`] in a build with `--cfg sim`.

#![forbid(unsafe_code)]

#[cfg(sim)]
mod command;

#[cfg(sim)]
fn main() -> std::process::ExitCode {
    command::main()
}

#[cfg(not(sim))]
fn main() -> std::process::ExitCode {
    eprintln!("this build cannot simulate; run `cargo xtask sim`, which builds with `--cfg sim`");
    std::process::ExitCode::from(2)
}

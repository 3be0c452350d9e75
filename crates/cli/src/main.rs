//! The program `moontide`. All code is in the library, so that a second link of the program, e.g. for the Python wheel,
//! does not compile it again.

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    moontide_cli::main()
}

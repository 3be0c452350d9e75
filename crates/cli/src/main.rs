//! The program `moontide`. Everything is in the library, so that a second link of the program, as for Python's wheel, does
//! not compile it again.

fn main() -> std::process::ExitCode {
    moontide_cli::main()
}

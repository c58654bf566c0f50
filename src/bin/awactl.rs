fn main() -> std::process::ExitCode {
    awactl::commands::main()
}

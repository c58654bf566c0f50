use clap::CommandFactory as _;
use clap_complete::Shell;

use super::{Cli, Context, ExitCode};

/// Print a completion script for a shell.
///
/// For bash: awactl completions bash > ~/.local/share/bash-completion/completions/awactl
#[derive(Debug, clap::Args)]
pub struct Args {
    #[arg(value_enum)]
    shell: Shell,
}

pub fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "awactl", &mut script);
    context.output.raw(&script)?;
    Ok(ExitCode::Done)
}

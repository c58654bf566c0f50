use std::path::PathBuf;

use anyhow::Context as _;
use clap::CommandFactory as _;

use super::{Cli, Context, ExitCode};

/// Print the manual page, or write the pages of all commands.
///
/// To read it: awactl man | man -l -
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Write one page a command into this folder, which is made if needed
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

pub fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    match &args.dir {
        Some(dir) => {
            std::fs::create_dir_all(dir)
                .and_then(|()| clap_mangen::generate_to(Cli::command(), dir))
                .with_context(|| format!("cannot write manual pages to {}", dir.display()))?;
            context.note(&format!("manual pages written to {}", dir.display()));
        }
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(Cli::command()).render(&mut page)?;
            context.output.raw(&page)?;
        }
    }
    Ok(ExitCode::Done)
}

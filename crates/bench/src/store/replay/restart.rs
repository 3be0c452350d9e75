//! Hits before and after a restart of the node: with its disk, without, and if the node is not restarted.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::{Args, ReplayCluster, check_content, disk_share};
use crate::plot::{self, Axis, PlotRow};
use crate::results::{BenchError, ResultRow, io, wrong};
use crate::store::replay::engines::Replay;

/// Parts of the trace that have a hit rate each.
const PARTS: usize = 20;

/// What happens to the node.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Case {
    RestartedWithDisk,
    RestartedWithoutDisk,
    NotRestarted,
}

impl Case {
    /// All cases, with their names in the results and in the plot.
    const ALL: [(Case, &str, &str); 3] = [
        (Case::RestartedWithDisk, "kept", "disk kept"),
        (Case::RestartedWithoutDisk, "lost", "disk lost"),
        (Case::NotRestarted, "running", "not restarted"),
    ];
}

/// Replays the trace with all cases, and prints and plots the hit rates.
pub(super) fn run(args: &Args, replay: &Replay, after: usize) -> Result<(), BenchError> {
    let all = replay.requests.len();
    if !(1..all).contains(&after) {
        return Err(wrong(format!("--restart-after must be 1 to {} for this trace", all.saturating_sub(1))));
    }
    // The restart is between two parts.
    let mut ends: Vec<usize> = (1..=PARTS).map(|part| all * part / PARTS).filter(|&end| end > 0).collect();
    ends.push(after);
    ends.sort_unstable();
    ends.dedup();
    let mut rows = vec![];
    for (case, result_name, name) in Case::ALL {
        let rates = hit_rates(args, replay, &ends, after, case, result_name)?;
        rows.push(PlotRow { name, is_subject: case == Case::RestartedWithDisk, rates });
    }
    if let Some(file) = &args.plot {
        let values: Vec<f64> = ends.iter().map(|&end| end as f64).collect();
        let labels = [0, all / 4, all / 2, all * 3 / 4, all].map(|at| (at as f64, at.to_string()));
        let first = values.first().copied().unwrap_or_default();
        let labels: Vec<_> = labels.into_iter().filter(|(at, _)| *at >= first).collect();
        let axis = Axis { title: "requests", values: &values, labels: &labels, is_logarithmic: false };
        let title = format!("Hit rate; the node restarts after {after} requests");
        plot::write(file, &plot::svg(&title, &axis, &rows))?;
    }
    Ok(())
}

/// Replays the trace. Returns the hit rate of each part.
fn hit_rates(
    args: &Args,
    replay: &Replay,
    ends: &[usize],
    after: usize,
    case: Case,
    name: &str,
) -> Result<Vec<f64>, BenchError> {
    let mut cluster = ReplayCluster::start(args)?;
    let store = cluster.store(args)?;
    let (mut rates, mut start) = (vec![], 0);
    for &end in ends {
        let started = Instant::now();
        let counts = replay.run(&store, start..end);
        check_content(&counts)?;
        ResultRow::new("trace", name)
            .with("requests_from", start)
            .with("requests_to", end)
            .number("hit_rate", counts.hit_rate())
            .number("disk_share_so_far", disk_share(&store))
            .with("failed", counts.failed.load(Ordering::Relaxed))
            .number("seconds", started.elapsed().as_secs_f64())
            .print();
        rates.push(counts.hit_rate());
        if end == after && case != Case::NotRestarted {
            let (disk, _) = cluster.disk.as_ref().expect("the parser requires a disk");
            let dir = disk.dir.clone();
            cluster.cluster.restart_node(|| match case {
                Case::RestartedWithoutDisk => {
                    std::fs::remove_dir_all(&dir).map_err(io("removing the disk's directory"))
                }
                _ => Ok(()),
            })?;
        }
        start = end;
    }
    Ok(rates)
}

//! GPUs: what the driver finds, which libraries there are, how the GPUs are linked, and how fast they are.

use super::{Section, Verdict, gib};
use crate::bench;
use lockstep_backend::cuda::survey::{self, Link, Survey};
use lockstep_backend::cuda::{self, SUM_RANKS, speed};

/// Shows a section for each part; whether `--device cuda` can be used.
pub(super) fn examine(quick: bool, show: &mut dyn FnMut(Section)) -> Verdict {
    let survey = match survey::survey() {
        Ok(survey) => survey,
        Err(error) => {
            let mut section = Section::new("GPUs");
            section.line("driver", error.to_string());
            show(section);
            return Err(error.to_string());
        }
    };
    show(driver(&survey));
    show(libraries());
    if survey.gpus.len() > 1 {
        show(links(&survey.links));
    }
    if let Some(gpu) = survey.gpus.first() {
        let mut section = Section::new("kernels");
        gpu.kernels().into_iter().for_each(|(operation, kernel)| section.line(operation, kernel));
        show(section);
    }
    // Opening a GPU finds what asking does not: a library without a function, kernels that do not compile.
    let mut section = Section::new("GPU speed");
    let mut usable = 0;
    let mut failure = "the driver names no GPU".to_owned();
    for index in 0..survey.gpus.len() {
        match speed::measure(index, quick) {
            Ok(speed) => {
                usable += 1;
                section.line(format!("GPU {index}"), speed.to_string());
            }
            Err(error) => {
                section.line(format!("GPU {index}"), error.to_string());
                failure = error.to_string();
            }
        }
    }
    let all_usable = usable == survey.gpus.len();
    let ranks = SUM_RANKS.into_iter().rev().find(|ranks| *ranks <= usable && all_usable);
    if let Some(ranks) = ranks.filter(|_| !quick) {
        match bench::few_sums(ranks) {
            Ok(lines) => lines.into_iter().for_each(|(name, value)| section.line(name, value)),
            Err(error) => section.line(format!("sum of {ranks} GPUs"), error.message),
        }
    }
    show(section);
    match usable {
        0 => Err(failure),
        count => Ok(format!("can be used, --tp up to {count}")),
    }
}

fn driver(survey: &Survey) -> Section {
    let mut section = Section::new("GPUs");
    let (major, minor) = survey.cuda;
    let own = survey.driver.as_ref().map_or_else(String::new, |version| format!("{version}, "));
    section.line("driver", format!("{own}for CUDA {major}.{minor}"));
    for (index, gpu) in survey.gpus.iter().enumerate() {
        let free = gpu.free_bytes.map_or_else(String::new, |bytes| format!(" ({} free)", gib(bytes as u64)));
        let (major, minor) = gpu.capability;
        let value = format!(
            "{}, compute capability {major}.{minor}, {} multiprocessors, {}{free}, PCI {}",
            gpu.name,
            gpu.sm_count,
            gib(gpu.total_bytes as u64),
            gpu.pci
        );
        section.line(format!("GPU {index}"), value);
    }
    section
}

fn libraries() -> Section {
    let mut section = Section::new("libraries");
    for library in survey::libraries() {
        let found = match library.found {
            Ok((file, version)) => format!("{version}, {file}"),
            Err(error) => error.to_string(),
        };
        section.line(library.purpose, found);
    }
    let kernels = cuda::kernel_cache().map_or_else(
        || "none: neither LOCKSTEP_CACHE nor HOME is set, so kernels are compiled at every start".into(),
        |folder| folder.display().to_string(),
    );
    section.line("compiled kernels", kernels);
    section
}

/// One line a GPU: how it reaches each of the others.
fn links(links: &[Vec<Option<Link>>]) -> Section {
    let mut section = Section::new("links");
    for (from, row) in links.iter().enumerate() {
        let cells =
            row.iter().enumerate().filter_map(|(to, link)| Some(format!("{to}: {}", link_text((*link)?))));
        section.line(format!("GPU {from} to"), cells.collect::<Vec<_>>().join(", "));
    }
    section
}

fn link_text(link: Link) -> String {
    match link {
        Link { peer_access: true, nvlinks: 0 } => "PCI, direct".into(),
        Link { peer_access: true, nvlinks } => format!("{nvlinks} NVLinks"),
        Link { peer_access: false, .. } => "no direct access, through host memory".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_told_for_each_pair() {
        let near = Some(Link { peer_access: true, nvlinks: 18 });
        let far = Some(Link { peer_access: false, nvlinks: 0 });
        let bus = Some(Link { peer_access: true, nvlinks: 0 });
        let section = links(&[vec![None, near, far], vec![near, None, bus], vec![far, bus, None]]);
        assert_eq!(
            section.text(),
            "links\n  GPU 0 to  1: 18 NVLinks, 2: no direct access, through host memory\n  \
             GPU 1 to  0: 18 NVLinks, 2: PCI, direct\n  \
             GPU 2 to  0: no direct access, through host memory, 1: PCI, direct\n"
        );
    }
}

//! Checks on documentation: the map names only what exists, and relative links lead somewhere.
//!
//! Owns just enough Markdown for that: fenced blocks are passed over, code spans and links are found within a line.

use super::Finding;
use super::tree::Tree;

/// The page on which every path in backticks is checked.
const MAP: &str = "ARCHITECTURE.md";
/// A code span that ends in one of these is a path even without a `/`.
const FILE_EXTENSIONS: &[&str] = &[".json", ".lock", ".md", ".proto", ".py", ".rs", ".sh", ".toml", ".yml"];

/// Every path in backticks on the map exists; globs match something.
pub(super) fn paths_on_map(tree: &Tree) -> Vec<Finding> {
    let Some(text) = tree.text(MAP) else { return vec![Finding::new(MAP, "is missing")] };
    let mut findings = Vec::new();
    for (line, prose) in prose_lines(text) {
        for span in split_code(prose).0 {
            if looks_like_path(span) && !tree.has(span) {
                let what = if span.contains('*') { "matches nothing" } else { "does not exist" };
                findings.push(Finding::new(
                    format!("{MAP}:{line}"),
                    format!("`{span}` {what}; paths on the map start at the workspace root"),
                ));
            }
        }
    }
    findings
}

/// Every relative link of every page leads to a file or directory of the checkout.
pub(super) fn links(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (page, text) in tree.files().filter(|(path, _)| path.ends_with(".md")) {
        for (line, prose) in prose_lines(text) {
            let prose = split_code(prose).1;
            for link in link_targets(&prose) {
                if !leads_somewhere(tree, page, link) {
                    findings
                        .push(Finding::new(format!("{page}:{line}"), format!("link to `{link}` is dead")));
                }
            }
        }
    }
    findings
}

/// Numbered lines outside fenced blocks.
fn prose_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fence: Option<&str> = None;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let mark = ["```", "~~~"].into_iter().find(|mark| line.trim_start().starts_with(mark));
        match (fence, mark) {
            (None, Some(mark)) => fence = Some(mark),
            (Some(open), Some(mark)) if open == mark => fence = None,
            (None, None) => return true,
            (Some(_), _) => {}
        }
        false
    })
}

/// The code spans of a line, and the line with them blanked out.
fn split_code(line: &str) -> (Vec<&str>, String) {
    let (mut spans, mut prose, mut rest) = (Vec::new(), String::new(), line);
    while let Some(open) = rest.find('`') {
        let (before, from_ticks) = rest.split_at(open);
        let ticks_len = from_ticks.len() - from_ticks.trim_start_matches('`').len();
        let (ticks, inside) = from_ticks.split_at(ticks_len);
        let Some(close) = inside.find(ticks) else { break };
        spans.push(inside[..close].trim());
        prose.push_str(before);
        prose.push(' ');
        rest = &inside[close + ticks_len..];
    }
    prose.push_str(rest);
    (spans, prose)
}

fn looks_like_path(span: &str) -> bool {
    let is_plain = span.chars().all(|c| c.is_ascii_alphanumeric() || "._-/*".contains(c));
    let names_file = FILE_EXTENSIONS.iter().any(|extension| span.ends_with(extension) && span != *extension);
    // Absolute paths belong to the system, not to the checkout.
    is_plain && !span.starts_with(['/', '-']) && (span.contains('/') || names_file)
}

/// Targets of `[text](target)`, `![text](target)` and `[name]: target`.
fn link_targets(prose: &str) -> Vec<&str> {
    let inline = prose.match_indices("](").map(|(at, opening)| {
        let tail = &prose[at + opening.len()..];
        &tail[..tail.find(')').unwrap_or(tail.len())]
    });
    let definition = prose
        .strip_prefix('[')
        .and_then(|tail| tail.split_once("]:"))
        .filter(|(name, _)| !name.contains(']'))
        .map(|(_, target)| target);
    inline
        .chain(definition)
        // A title may follow the target.
        .filter_map(|target| target.split_whitespace().next())
        .map(|target| target.trim_start_matches('<').trim_end_matches('>'))
        .collect()
}

fn leads_somewhere(tree: &Tree, page: &str, link: &str) -> bool {
    let path = link.split(['#', '?']).next().unwrap_or_default();
    let is_elsewhere = link.contains("://") || link.starts_with("mailto:");
    if is_elsewhere || path.is_empty() {
        return true;
    }
    let folder = page.rsplit_once('/').map_or("", |(folder, _)| folder);
    resolve(folder, path).is_some_and(|path| !path.contains('*') && tree.has(&path))
}

/// `path` as seen from `folder`, from the workspace root; `None` when it leaves the checkout.
fn resolve(folder: &str, path: &str) -> Option<String> {
    let (start, path) = match path.strip_prefix('/') {
        Some(from_root) => ("", from_root),
        None => (folder, path),
    };
    let mut parts: Vec<&str> = Vec::new();
    for part in start.split('/').chain(path.split('/')) {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(findings: &[Finding]) -> Vec<&str> {
        findings.iter().map(|finding| finding.place.as_str()).collect()
    }

    #[test]
    fn a_path_on_the_map_that_is_gone_is_found_with_its_line() {
        let map = "# Map\n`crates/heap/src/lib.rs` and `crates/*/src`\n\n`crates/heap/src/gone.rs`\n`crates/*.zig`\n";
        let tree = Tree::of(&[(MAP, map), ("crates/heap/src/lib.rs", "")]);
        let findings = paths_on_map(&tree);
        assert_eq!(places(&findings), ["ARCHITECTURE.md:4", "ARCHITECTURE.md:5"]);
        assert!(findings[0].what.contains("`crates/heap/src/gone.rs` does not exist"), "{}", findings[0]);
        assert!(findings[1].what.contains("matches nothing"), "{}", findings[1]);
    }

    #[test]
    fn a_missing_map_is_found() {
        assert_eq!(places(&paths_on_map(&Tree::default())), [MAP]);
    }

    #[test]
    fn fenced_blocks_are_not_prose() {
        let map = "```text\n`crates/gone.rs`\n~~~\n```\n`crates/gone.rs`\n";
        assert_eq!(places(&paths_on_map(&Tree::of(&[(MAP, map)]))), ["ARCHITECTURE.md:5"]);
    }

    #[test]
    fn code_spans_that_are_no_paths_are_left_alone() {
        for path in ["crates/heap", "Cargo.toml", ".ci/run", "crates/*/src/**/*.rs", "docs/"] {
            assert!(looks_like_path(path), "{path}");
        }
        for other in
            ["heap", "//!", ".proto", "/dev/shm", "a / b", "meta::decide", "--cfg loom", "u64", "<x>/y"]
        {
            assert!(!looks_like_path(other), "{other}");
        }
    }

    #[test]
    fn dead_links_are_found_with_their_line() {
        let page = "[ok](../README.md#status) [dead](missing.md)\n\
                    [web](https://example.org/x) [here](#top) [mail](mailto:a@example.org)\n\
                    `[code](nowhere.md)` [`code`](gone/)\n\
                    [name]: other.md\n\
                    [out](../../secret.md)\n";
        let tree =
            Tree::of(&[("docs/page.md", page), ("README.md", "[d](docs) [p](/docs/page.md \"title\")\n")]);
        let findings = links(&tree);
        assert_eq!(
            places(&findings),
            ["docs/page.md:1", "docs/page.md:3", "docs/page.md:4", "docs/page.md:5"]
        );
        assert!(findings[0].what.contains("`missing.md`"), "{}", findings[0]);
    }

    #[test]
    fn code_spans_are_split_from_prose() {
        assert_eq!(split_code("a `b` c ``d ` e`` f"), (vec!["b", "d ` e"], "a   c   f".to_owned()));
        assert_eq!(split_code("it`s open"), (vec![], "it`s open".to_owned()));
    }
}

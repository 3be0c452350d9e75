//! Checks on documentation: the map names only what exists, and relative links lead to existing files and headings.
//!
//! Owns just enough Markdown for that: fenced blocks are passed over, code spans, links and headings are found within a
//! line.

use std::collections::BTreeSet;

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

/// Every relative link of every page leads to a file or directory of the checkout. If it names a heading of a page, that
/// heading exists.
pub(super) fn links(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (page, text) in tree.files().filter(|(path, _)| path.ends_with(".md")) {
        for (line, prose) in prose_lines(text) {
            let prose = split_code(prose).1;
            for link in link_targets(&prose) {
                let location = || format!("{page}:{line}");
                let Some(target) = target_of(page, link) else { continue };
                if !target.path.as_ref().is_some_and(|path| !path.contains('*') && tree.has(path)) {
                    findings.push(Finding::new(location(), format!("link to `{link}` is dead")));
                } else if !has_anchor(tree, &target) {
                    let what = format!("link to `{link}` is dead: the page has no such heading");
                    findings.push(Finding::new(location(), what));
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

/// Target of a link within the checkout.
struct Target<'a> {
    /// From the workspace root; `None` if the link leaves the checkout.
    path: Option<String>,
    /// Name of a heading of the page.
    anchor: Option<&'a str>,
}

/// `None` for a link to another site.
fn target_of<'a>(page: &str, link: &'a str) -> Option<Target<'a>> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = match link.split_once('#') {
        Some((path, anchor)) => (path, Some(anchor)),
        None => (link, None),
    };
    let path = path.split('?').next().unwrap_or_default();
    if path.is_empty() {
        return Some(Target { path: Some(page.to_owned()), anchor });
    }
    let folder = page.rsplit_once('/').map_or("", |(folder, _)| folder);
    Some(Target { path: resolve(folder, path), anchor })
}

/// Whether the target names no heading, is not a page, or names a heading that the page has.
fn has_anchor(tree: &Tree, target: &Target<'_>) -> bool {
    let (Some(path), Some(anchor)) = (&target.path, target.anchor) else { return true };
    match tree.text(path) {
        Some(text) if path.ends_with(".md") => anchors(text).contains(anchor),
        _ => true,
    }
}

/// The names of a page's headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for (_, line) in prose_lines(text) {
        let title = line.trim_start_matches('#');
        let level = line.len() - title.len();
        if !(1..=6).contains(&level) || !title.starts_with(' ') {
            continue;
        }
        let name = anchor_of(title.trim());
        // A second heading of the same name gets a number.
        let mut unique = name.clone();
        for number in 1.. {
            if anchors.insert(unique) {
                break;
            }
            unique = format!("{name}-{number}");
        }
    }
    anchors
}

/// The name of a heading: lower case, without punctuation, `-` for each space. Of a link only the text counts.
fn anchor_of(title: &str) -> String {
    let mut text = String::new();
    let mut rest = title;
    while let Some((before, tail)) = rest.split_once("](") {
        text.push_str(before);
        rest = tail.split_once(')').map_or("", |(_, after)| after);
    }
    text.push_str(rest);
    let kept = text.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
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
        findings.iter().map(|finding| finding.location.as_str()).collect()
    }

    #[test]
    fn missing_path_in_architecture_map_is_reported_with_location() {
        let map = "# Map\n`crates/heap/src/lib.rs` and `crates/*/src`\n\n`crates/heap/src/gone.rs`\n`crates/*.zig`\n";
        let tree = Tree::of(&[(MAP, map), ("crates/heap/src/lib.rs", "")]);
        let findings = paths_on_map(&tree);
        assert_eq!(places(&findings), ["ARCHITECTURE.md:4", "ARCHITECTURE.md:5"]);
        assert!(findings[0].what.contains("`crates/heap/src/gone.rs` does not exist"), "{}", findings[0]);
        assert!(findings[1].what.contains("matches nothing"), "{}", findings[1]);
    }

    #[test]
    fn missing_architecture_map_is_reported() {
        assert_eq!(places(&paths_on_map(&Tree::default())), [MAP]);
    }

    #[test]
    fn paths_in_fenced_code_blocks_are_ignored() {
        let map = "```text\n`crates/gone.rs`\n~~~\n```\n`crates/gone.rs`\n";
        assert_eq!(places(&paths_on_map(&Tree::of(&[(MAP, map)]))), ["ARCHITECTURE.md:5"]);
    }

    #[test]
    fn looks_like_path_accepts_only_repository_paths() {
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
    fn dead_links_are_reported_with_location() {
        let page = "[ok](../README.md) [dead](missing.md)\n\
                    [web](https://example.org/x) [mail](mailto:a@example.org)\n\
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
    fn link_to_missing_heading_is_reported_with_location() {
        let page = "# Page\n[ok](#page) [ok](other.md#two-words) [dead](#nowhere)\n\
                    [`dead`](other.md#in-code) [source](x.rs#L5) [ok](other.md#again-1)\n";
        let other = "# Other\n## Two words\n```sh\n# In code\n```\n## Again\n## Again\n";
        let tree = Tree::of(&[("docs/page.md", page), ("docs/other.md", other), ("docs/x.rs", "")]);
        let findings = links(&tree);
        assert_eq!(places(&findings), ["docs/page.md:2", "docs/page.md:3"]);
        assert!(findings[0].what.contains("`#nowhere` is dead: the page has no such heading"));
        assert!(findings[1].what.contains("`other.md#in-code`"), "{}", findings[1]);
    }

    #[test]
    fn anchor_is_lower_case_without_punctuation() {
        for (title, anchor) in [
            ("Paged block cache", "paged-block-cache"),
            ("`crates/heap`", "cratesheap"),
            ("Begin, bytes & Commit", "begin-bytes--commit"),
            ("The [glossary](x.md#y) of `a_b`", "the-glossary-of-a_b"),
        ] {
            assert_eq!(anchor_of(title), anchor);
        }
    }

    #[test]
    fn code_spans_are_split_from_prose() {
        assert_eq!(split_code("a `b` c ``d ` e`` f"), (vec!["b", "d ` e"], "a   c   f".to_owned()));
        assert_eq!(split_code("it`s open"), (vec![], "it`s open".to_owned()));
    }
}

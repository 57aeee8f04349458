//! The nearest known name to one that is not known.

/// The candidate that takes the fewest edits to reach from `name`, if that is few enough to have been
/// meant.
pub(crate) fn nearest<'a>(
    name: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let most = (name.chars().count() / 3).clamp(1, 3);
    candidates
        .into_iter()
        .map(|candidate| (edits(name, candidate), candidate))
        .filter(|(edits, _)| *edits <= most)
        .min_by_key(|(edits, _)| *edits)
        .map(|(_, candidate)| candidate)
}

/// Insertions, deletions and replacements between two words, and swaps of neighbours.
fn edits(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut before: Vec<usize> = Vec::new();
    let mut above: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replaced = above[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = replaced.min(above[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(before[j - 2] + 1);
            }
            row.push(best);
        }
        before = std::mem::replace(&mut above, row);
    }
    above[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_finds_its_word_and_a_stranger_none() {
        let words = ["listen", "lease", "eviction_ratio", "high_watermark"];
        assert_eq!(nearest("lsiten", words), Some("listen"));
        assert_eq!(nearest("leese", words), Some("lease"));
        assert_eq!(nearest("evictionratio", words), Some("eviction_ratio"));
        assert_eq!(nearest("capacity", words), None);
        assert_eq!(nearest("", words), None);
    }

    #[test]
    fn edits_are_counted_like_a_typist_makes_them() {
        assert_eq!(edits("abc", "abc"), 0);
        assert_eq!(edits("", "abc"), 3);
        assert_eq!(edits("abcd", "acbd"), 1);
        assert_eq!(edits("kitten", "sitting"), 3);
    }
}

//! The page on configuration is made from the tables of settings.

use std::fmt::Write as _;
use std::path::Path;

use super::programs::{Common, MasterSettings, NodeSettings, ToolSettings, TransportSettings};
use super::{Setting, Settings};

const INTRODUCTION: &str = "# Configuration

Every program takes its settings from, in this order: defaults, one file in TOML, or in JSON if its name ends
in `.json` (`--config FILE` or `LAYERCAKE_CONFIG`), environment
variables, flags. A later one wins. Behind the file stands a Mooncake configuration in JSON, if `MOONCAKE_CONFIG_PATH` names one: its
`master_server_address`, `global_segment_size`, `local_hostname` and `tenant_id` count, and `layercake doctor` says what becomes of the others. What is unknown is refused by name, and so is what contradicts itself.
`layercake config show master` and `layercake config show node` print the effective values and where each came from.

Sizes have units (`90MiB`, `16GiB`), durations too (`200ms`, `5s`, `10min`). One file serves all programs:

```toml
token_file = \"/etc/layercake/token\"

[master]
listen = \"10.0.0.1:50061\"
http = \"127.0.0.1:9103\"

[node]
master = \"10.0.0.1:50061\"
capacity = \"64GiB\"
```

Flags are the names below with `-` for `_`.
";

fn section(page: &mut String, title: &str, group: &[Setting]) {
    let _ = write!(
        page,
        "\n## {title}\n\n| setting | default | variable | meaning |\n| --- | --- | --- | --- |\n"
    );
    for setting in group {
        let _ = writeln!(
            page,
            "| `{}` | `{}` | `{}` | {}{} |",
            setting.path(),
            setting.default,
            setting.env_name(),
            setting.help,
            if setting.secret {
                " (only as a variable)"
            } else {
                ""
            },
        );
    }
}

fn page() -> String {
    let mut page = INTRODUCTION.to_owned();
    section(&mut page, "All programs", Common::TABLE);
    section(&mut page, "`layercake master`", MasterSettings::TABLE);
    section(&mut page, "`layercake node`", NodeSettings::TABLE);
    section(
        &mut page,
        "Moving bytes: nodes and clients",
        TransportSettings::TABLE,
    );
    section(&mut page, "Tools", ToolSettings::TABLE);
    page
}

#[test]
fn the_page_on_configuration_lists_every_setting() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let path = root.join("docs/configuration.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, page()).expect("the page can be written");
    }
    let found = std::fs::read_to_string(&path).expect("the page is there");
    assert!(
        found == page(),
        "docs/configuration.md is not what the settings say: run this test with UPDATE_DOCS=1"
    );
}

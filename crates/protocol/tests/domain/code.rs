use layercake_protocol::code::ResultCode;

#[test]
fn the_table_has_the_published_values() {
    let values: Vec<i32> = ResultCode::ALL.iter().map(|c| c.value()).collect();
    assert_eq!(
        values,
        [
            0, -1, -3, -7, -102, -200, -600, -601, -702, -703, -704, -705, -706, -707, -800, -900,
            -901, -1400, -1700, -1701
        ]
    );
}

#[test]
fn a_code_is_found_by_its_value_and_says_what_it_means() {
    for &code in ResultCode::ALL {
        assert_eq!(ResultCode::from_value(code.as_result()), Some(code));
        let text = code.to_string();
        assert!(text.contains(&code.value().to_string()), "{text}");
        assert!(!text.contains("not in the table"), "{text}");
        assert_ne!(code.name(), "UNKNOWN");
    }
    for value in [1, -2, -599, i64::MIN, i64::MAX, i64::from(u32::MAX) + 1] {
        assert_eq!(ResultCode::from_value(value), None);
    }
}

#[test]
fn a_transfer_failure_never_promises_that_buffers_are_free() {
    for write in [false, true] {
        assert!(!ResultCode::TRANSFER_FAILED.releases_buffers(write));
        assert!(!ResultCode::FAILED.releases_buffers(write));
        assert!(ResultCode::NOT_FOUND.releases_buffers(write));
    }
    assert!(ResultCode::WRITE_ENDED.releases_buffers(true));
    assert!(!ResultCode::WRITE_ENDED.releases_buffers(false));
    assert!(ResultCode::LEASE_EXPIRED.releases_buffers(false));
}
